"""Runs upstream's server code from the package ``xllamacpp`` as if it were ``llama-server``.

``python -m warmslot.launcher.embedded -m MODEL -np 4 …`` takes llama-server's own options (those listed by
``--help``, with upstream's names, meanings and defaults), serves HTTP by itself and logs as llama-server
does. It is what makes a machine without any llama-server useful; a stock one is preferred where it exists.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LAYERS = {"auto": -1, "all": -2}
"""How the engine's parameters spell these values of ``--gpu-layers``."""

_COLUMN = 40
"""Where explanations begin in the help."""

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_SPECULATION = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Kinds of drafts that need no second model."""
_REASONING = ("none", "auto", "deepseek", "deepseek-legacy")


class OptionError(Exception):
    """An option that is unknown here or has an impossible value; the message is one line."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how it is written, what it does to the engine's parameters, what it means.

    ``metavar`` is ``None`` for switches. A switch with ``off`` names can be negated.
    """

    names: tuple[str, ...]
    apply: Callable[[Any, Any], None]
    help: str
    metavar: str | None = None
    off: tuple[str, ...] = ()
    convert: Callable[[str], Any] = str


def _field(path: str) -> Callable[[Any, Any], None]:
    """Write a value to the parameter at a dotted ``path``."""
    *parents, last = path.split(".")

    def apply(params: Any, value: Any) -> None:
        for parent in parents:
            params = getattr(params, parent)
        setattr(params, last, value)

    return apply


def _both(*applies: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def apply(params: Any, value: Any) -> None:
        for each in applies:
            each(params, value)

    return apply


def _one_of(*allowed: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text

    return convert


def _layers(text: str) -> int:
    if text in _LAYERS:
        return _LAYERS[text]
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number, auto or all") from None


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError("an existing folder")
    return text.rstrip("/") + "/"


def _cache_type(path: str) -> Callable[[Any, Any], None]:
    def apply(params: Any, value: str) -> None:
        name = f"GGML_TYPE_{value.upper()}"
        setattr(params, path, getattr(importlib.import_module("xllamacpp").ggml_type, name))

    return apply


def _flash_attention(params: Any, value: str) -> None:
    kinds = importlib.import_module("xllamacpp").llama_flash_attn_type
    name = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[value]
    params.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{name}")


def _reasoning_format(params: Any, value: str) -> None:
    kinds = importlib.import_module("xllamacpp").common_reasoning_format
    params.reasoning_format = getattr(kinds, f"COMMON_REASONING_FORMAT_{value.upper().replace('-', '_')}")


def _speculation(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        _one_of(*_SPECULATION)(kind)
    return kinds


def _speculate(params: Any, value: list[str]) -> None:
    kinds = importlib.import_module("xllamacpp").common_speculative_type
    names = [f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}" for kind in value]
    params.speculative.types = [getattr(kinds, name) for name in names]


def _split(path: str, container: Callable[[list[str]], Any]) -> Callable[[Any, Any], None]:
    def apply(params: Any, value: str) -> None:
        setattr(params, path, container([part for part in value.split(",") if part]))

    return apply


OPTIONS: tuple[Option, ...] = (
    Option(("-m", "--model"), _field("model.path"), "model file (GGUF)", "FNAME"),
    Option(
        ("-a", "--alias"), _split("model_alias", set), "model names for the API, comma-separated", "STRING"
    ),
    Option(
        ("-np", "--parallel"), _field("n_parallel"), "number of slots (default: -1 = auto)", "N", convert=int
    ),
    Option(
        ("-c", "--ctx-size"), _field("n_ctx"), "context of all slots together (0 = model's)", "N", convert=int
    ),
    Option(
        ("-kvu", "--kv-unified"),
        _field("kv_unified"),
        "one KV buffer shared by all slots (default: only when the number of slots is auto)",
        off=("-no-kvu", "--no-kv-unified"),
    ),
    Option(("--host",), _split("hostnames", list), "addresses to listen on, comma-separated", "HOST"),
    Option(
        ("--port",),
        _field("port"),
        "port to listen on (default: 8080, 0 = any free one)",
        "PORT",
        convert=int,
    ),
    Option(
        ("--cache-idle-slots",),
        _field("cache_idle_slots"),
        "save idle slots to the prompt cache on a new task (default: enabled)",
        off=("--no-cache-idle-slots",),
    ),
    Option(
        ("-cram", "--cache-ram"),
        _field("cache_ram_mib"),
        "prompt cache in host memory, MiB (default: 8192, 0 = off)",
        "N",
        convert=int,
    ),
    Option(
        ("--cache-prompt",),
        _field("cache_prompt"),
        "reuse what a slot holds (default: enabled)",
        off=("--no-cache-prompt",),
    ),
    Option(
        ("--cache-reuse",), _field("n_cache_reuse"), "least chunk to reuse by KV shifting", "N", convert=int
    ),
    Option(
        ("-sps", "--slot-prompt-similarity"),
        _field("slot_prompt_similarity"),
        "share of a prompt that must match for its slot to be preferred (default: 0.10)",
        "SIMILARITY",
        convert=float,
    ),
    Option(("--slots",), _field("endpoint_slots"), "serve /slots (default: enabled)", off=("--no-slots",)),
    Option(("--metrics",), _field("endpoint_metrics"), "serve /metrics"),
    Option(("--props",), _field("endpoint_props"), "allow POST /props"),
    Option(
        ("--slot-save-path",), _field("slot_save_path"), "folder for saved slots", "PATH", convert=_folder
    ),
    Option(
        ("-t", "--threads"),
        _field("cpuparams.n_threads"),
        "CPU threads for generation (default: -1 = by the machine)",
        "N",
        convert=int,
    ),
    Option(
        ("-tb", "--threads-batch"),
        _field("cpuparams_batch.n_threads"),
        "CPU threads for prompts (default: as --threads)",
        "N",
        convert=int,
    ),
    Option(("--threads-http",), _field("n_threads_http"), "threads for HTTP", "N", convert=int),
    Option(("-b", "--batch-size"), _field("n_batch"), "logical batch size (default: 2048)", "N", convert=int),
    Option(
        ("-ub", "--ubatch-size"), _field("n_ubatch"), "physical batch size (default: 512)", "N", convert=int
    ),
    Option(
        ("-n", "--predict", "--n-predict"), _field("n_predict"), "most tokens to generate", "N", convert=int
    ),
    Option(("-s", "--seed"), _field("sampling.seed"), "random seed", "SEED", convert=int),
    Option(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        _field("n_gpu_layers"),
        "layers on the GPU: a number, auto or all",
        "N",
        convert=_layers,
    ),
    Option(
        ("-fa", "--flash-attn"),
        _flash_attention,
        "flash attention: on, off or auto",
        "MODE",
        convert=_one_of("on", "off", "auto"),
    ),
    Option(
        ("-ctk", "--cache-type-k"),
        _cache_type("cache_type_k"),
        "KV cache type for K",
        "TYPE",
        convert=_one_of(*_CACHE_TYPES),
    ),
    Option(
        ("-ctv", "--cache-type-v"),
        _cache_type("cache_type_v"),
        "KV cache type for V",
        "TYPE",
        convert=_one_of(*_CACHE_TYPES),
    ),
    Option(("--swa-full",), _field("swa_full"), "full-size cache for sliding-window layers"),
    Option(
        ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
        _field("n_ctx_checkpoints"),
        "context checkpoints per slot (default: 32)",
        "N",
        convert=int,
    ),
    Option(
        ("-cms", "--checkpoint-min-step"),
        _field("checkpoint_min_step"),
        "least tokens between checkpoints (default: 8192)",
        "N",
        convert=int,
    ),
    Option(
        ("--spec-type",),
        _speculate,
        "kinds of drafts without a model, comma-separated (default: none)",
        "TYPE",
        convert=_speculation,
    ),
    Option(
        ("--spec-ngram-simple-size-n",),
        _field("speculative.ngram_simple.size_n"),
        "tokens that ngram-simple looks up (default: 12)",
        "N",
        convert=int,
    ),
    Option(
        ("--spec-ngram-simple-size-m",),
        _field("speculative.ngram_simple.size_m"),
        "tokens that ngram-simple drafts (default: 48)",
        "N",
        convert=int,
    ),
    Option(
        ("--spec-ngram-simple-min-hits",),
        _field("speculative.ngram_simple.min_hits"),
        "hits that ngram-simple needs (default: 1)",
        "N",
        convert=int,
    ),
    Option(("--context-shift",), _field("ctx_shift"), "shift a full context", off=("--no-context-shift",)),
    Option(("--warmup",), _field("warmup"), "one empty run at the start", off=("--no-warmup",)),
    Option(("--jinja",), _field("use_jinja"), "use the model's chat template engine", off=("--no-jinja",)),
    Option(("--chat-template",), _field("chat_template"), "another chat template", "JINJA_TEMPLATE"),
    Option(
        ("--reasoning-format",),
        _reasoning_format,
        "how thoughts are returned",
        "FORMAT",
        convert=_one_of(*_REASONING),
    ),
    Option(("--api-key",), _split("api_keys", list), "keys that clients must send, comma-separated", "KEY"),
    Option(("--api-prefix",), _field("api_prefix"), "prefix of all routes", "PREFIX"),
    Option(
        ("-to", "--timeout"),
        _both(_field("timeout_read"), _field("timeout_write")),
        "read and write timeout in seconds (default: 3600)",
        "N",
        convert=int,
    ),
    Option(("--ui", "--webui"), _field("ui"), "serve the web page", off=("--no-ui", "--no-webui")),
    Option(
        ("-lv", "--verbosity", "--log-verbosity"),
        _field("verbosity"),
        "log verbosity (default: 3)",
        "N",
        convert=int,
    ),
)

_BY_NAME = {
    name: (option, name not in option.off) for option in OPTIONS for name in (*option.names, *option.off)
}

DEFAULTS = ("--parallel", "-1", "--port", "8080")
"""Where the library's defaults differ from llama-server's."""


def parse(arguments: Sequence[str]) -> list[tuple[Option, Any]]:
    """The options in ``arguments``, each with its value. Raises :class:`OptionError`."""
    parsed: list[tuple[Option, Any]] = []
    words = iter(arguments)
    for word in words:
        name = word.replace("_", "-") if word.startswith("--") else word
        if name not in _BY_NAME:
            raise OptionError(f"the embedded engine has no option {word} (--help lists those that it has)")
        option, value = _BY_NAME[name]
        if option.metavar is None:
            parsed.append((option, value))
            continue
        text = next(words, None)
        if text is None:
            raise OptionError(f"option {word} needs a value {option.metavar}")
        try:
            parsed.append((option, option.convert(text)))
        except ValueError as error:
            wanted = {int: "a whole number", float: "a number"}.get(option.convert) or str(error)  # type: ignore[call-overload]
            raise OptionError(f"option {word}: found {text!r}, allowed is {wanted}") from None
    return parsed


def help_text() -> str:
    """All options, laid out as llama-server's own help."""
    lines = ["----- options of the embedded engine -----", ""]
    for option in OPTIONS:
        left = ", ".join((*option.names, *option.off)) + (f" {option.metavar}" if option.metavar else "")
        lines.append(
            f"{left:<{_COLUMN - 1}} {option.help}"
            if len(left) < _COLUMN
            else f"{left}\n{'':<{_COLUMN - 1}} {option.help}"
        )
    return "\n".join(lines)


def serve(parsed: Sequence[tuple[Option, Any]]) -> int:
    """Load the model and serve until a signal to stop. Returns the exit status."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    if key := os.environ.get("LLAMA_API_KEY"):  # as llama-server; an option comes after it
        parsed = [*parse(["--api-key", key]), *parsed]
    for option, value in (*parse(DEFAULTS), *parsed):
        option.apply(params, value)
    if not params.model.path:
        raise OptionError("no model given (-m FNAME)")
    # While loading, the thread that could run a Python handler is inside the library: the default action
    # ends the process at once, which loses nothing.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:  # the engine has logged the reason
        return 1
    _wait_for_stop()
    del server  # stops the HTTP threads and the inference loop, and waits for them
    return 0


def _wait_for_stop() -> None:
    """Return on the first SIGTERM or SIGINT, whichever thread the system hands it to."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.read(awake, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m warmslot.launcher.embedded``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "-h" in arguments or "--help" in arguments:
        print(help_text())  # noqa: T201 - what was asked for
        return 0
    try:
        return serve(parse(arguments))
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - where llama-server says it
        return 1


if __name__ == "__main__":
    sys.exit(main())
