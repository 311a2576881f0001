"""The command line that starts a backend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from warmslot.launcher.command import CommandError, build_command
from warmslot.launcher.engine import Engine, EngineKind, parse_help
from warmslot.router.config import Backend

HELP = """\
-m,    --model FNAME
-np,   --parallel N
-c,    --ctx-size N
-t,    --threads N
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
--cache-idle-slots, --no-cache-idle-slots
-cram, --cache-ram N
--host HOST
--port PORT
--slots, --no-slots
--metrics
--log-jsonl, --no-log-jsonl
--slot-save-path PATH
-ngl,  --gpu-layers N
"""
MODEL = Path("/models/m.gguf")


def engine(help_text: str = HELP) -> Engine:
    return Engine(EngineKind.STOCK, ("/bin/llama-server",), "test", parse_help(help_text))


def backend(**settings: Any) -> Backend:
    return Backend(name="b", model=str(MODEL), **settings)


def test_the_launch_profile() -> None:
    command = build_command(engine(), backend(slots=3, context=2048), MODEL, port=0)
    assert command.argv == (
        *("/bin/llama-server", "-m", "/models/m.gguf", "-np", "3", "-c", "6144"),
        *("--host", "127.0.0.1", "--port", "0"),
        *(
            "--no-kv-unified",
            "--no-cache-idle-slots",
            "--cache-ram",
            "0",
            "--slots",
            "--metrics",
            "--log-jsonl",
        ),
    )
    assert command.left_out == ()


def test_slots_that_are_to_share_one_context() -> None:
    argv = build_command(engine(), backend(kv_unified=True), MODEL).argv
    assert "--kv-unified" in argv
    assert "--no-kv-unified" not in argv


def test_settings_and_extra_arguments_are_appended() -> None:
    spec = backend(threads=2, cache_ram=512, slot_save_path="/saves", args=("-ngl", "99", "--frob"))
    argv = build_command(engine(), spec, MODEL).argv
    assert argv[-7:] == ("-t", "2", "--slot-save-path", "/saves", "-ngl", "99", "--frob")
    assert argv[argv.index("--cache-ram") + 1] == "512"


def test_the_backends_environment_overrides_the_inherited_one() -> None:
    command = build_command(engine(), backend(env={"A": "2"}), MODEL, env={"A": "1", "B": "1"})
    assert dict(command.env) == {"A": "2", "B": "1"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--parallel", "8"), "the extra argument --parallel clashes with -np 4, .*the setting slots"),
        (("--ctx_size", "8"), "the extra argument --ctx_size clashes with -c 16384, .*the setting context"),
        (("-kvu",), "the extra argument -kvu clashes with --no-kv-unified"),
        (("--no-log-jsonl",), "the extra argument --no-log-jsonl clashes with --log-jsonl"),
        (
            ("-ngl", "9", "-cram", "1"),
            "the extra argument -cram clashes with --cache-ram 0, .*setting cache_ram",
        ),
    ],
)
def test_a_clash_names_both(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(CommandError, match=f"^backend 'b': {said}"):
        build_command(engine(), backend(args=args), MODEL)


def test_threads_may_be_an_extra_argument_where_the_setting_is_not_used() -> None:
    assert build_command(engine(), backend(args=("-t", "2")), MODEL).argv[-2:] == ("-t", "2")
    with pytest.raises(CommandError, match="-t clashes with -t 1"):
        build_command(engine(), backend(threads=1, args=("-t", "2")), MODEL)


def test_flags_that_the_engine_lacks_are_left_out() -> None:
    old = re.sub(r"(?m)^(--log-jsonl|--cache-idle-slots).*\n", "", HELP)
    command = build_command(engine(old), backend(), MODEL)
    assert [str(flag) for flag in command.left_out] == ["--no-cache-idle-slots", "--log-jsonl"]
    assert not {"--no-cache-idle-slots", "--log-jsonl"} & set(command.argv)


def test_an_essential_option_that_the_engine_lacks_is_an_error() -> None:
    with pytest.raises(CommandError, match="the engine /bin/llama-server has no option -np"):
        build_command(engine(HELP.replace("-np,   --parallel N\n", "")), backend(), MODEL)


KEYED = HELP + "--api-key KEY\n"


def test_a_key_is_told_by_the_environment_alone() -> None:
    keyed = backend(api_key="sk-of-its-own")
    command = build_command(engine(KEYED), keyed, MODEL, env={"LLAMA_API_KEY": "inherited", "A": "1"})
    assert not any("sk-of-its-own" in word for word in command.argv)
    assert command.env == {"LLAMA_API_KEY": "sk-of-its-own", "A": "1"}
    assert "sk-of-its-own" not in command.fingerprint
    assert command.fingerprint != build_command(engine(KEYED), backend(), MODEL, env={}).fingerprint


def test_a_key_that_nobody_told_the_router_of_is_not_inherited() -> None:
    inherited = {"LLAMA_API_KEY": "inherited"}
    assert build_command(engine(KEYED), backend(), MODEL, env=inherited).env == {}
    own = backend(env={"LLAMA_API_KEY": "meant"})
    assert build_command(engine(KEYED), own, MODEL, env=inherited).env == {"LLAMA_API_KEY": "meant"}


@pytest.mark.parametrize(
    ("help_text", "settings", "said"),
    [
        (
            KEYED,
            {"args": ("--api-key", "x")},
            "the extra argument --api-key clashes with the setting api_key",
        ),
        (KEYED, {"args": ("--api_key_file", "x")}, "--api_key_file clashes with the setting api_key"),
        (KEYED, {"api_key": "a-secret,b"}, "its api_key has a comma, which would make it two"),
        (HELP, {}, "the engine /bin/llama-server has no option --api-key, so no api_key"),
    ],
)
def test_a_key_that_cannot_be_told(help_text: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)) as refused:
        build_command(engine(help_text), backend(**{"api_key": "a-secret", **settings}), MODEL)
    assert "a-secret" not in str(refused.value)
