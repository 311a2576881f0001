"""The configuration file's model: pools, backends, policies, listening address, keys.

One YAML file is validated into :class:`Config` (reading it is :mod:`.config_file`'s work). Whoever reads a
setting reads it from here, so that its name, type, default and meaning exist once: the docstring below a
field is its text in the JSON schema and in ``docs/configuration.md``.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
POOL_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,126}$"
URL_PATTERN = r"^https?://[^\s/?#@]+/?$"
DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)? ?(ms|s|m|h)$"
CPUS_PATTERN = r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"
ORIGIN_PATTERN = r"^(\*|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+)$"
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?(B|kB|MB|GB|KiB|MiB|GiB)$"

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _with_unit(value: object, pattern: str, units: dict[str, float] | dict[str, int]) -> object:
    if isinstance(value, str) and re.match(pattern, value):
        unit = value.lstrip("0123456789. ")
        return float(value[: -len(unit)]) * units[unit]
    return value


def _seconds(value: object) -> object:
    return _with_unit(value, DURATION_PATTERN, _SECONDS)


def _bytes(value: object) -> object:
    size = _with_unit(value, SIZE_PATTERN, _BYTES)
    return math.floor(size) if isinstance(size, float) and isinstance(value, str) else size


Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    Field(ge=0, allow_inf_nan=False),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": DURATION_PATTERN}]}
    ),
]
"""A duration in seconds; written ``30``, ``"500ms"``, ``"30s"``, ``"5m"`` or ``"1h"``."""

Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    Field(ge=1),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
]
"""A size in bytes; written ``1048576``, ``"1MiB"`` or ``"1MB"``."""


class Problem(NamedTuple):
    """A setting that is wrong only beside another one."""

    path: tuple[str | int, ...]
    """Where, from the section whose check found it."""
    message: str


def _reject(problems: Iterator[Problem]) -> None:
    found = list(problems)
    if found:
        text = "; ".join(problem.message for problem in found)
        raise PydanticCustomError("problems", "{text}", {"text": text, "problems": found})


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Scheduling(Section):
    """How a pool's requests are ordered and how many run at once on each backend."""

    in_flight: Literal["serialize", "pair", "slots", "auto"] = "auto"
    """Requests at once on a backend: one, two, as many as it has slots, or what measured rates say."""
    queue: Literal["reuse", "fifo"] = "reuse"
    """Who goes next: the shortest uncached prompt with a bound on waiting, or arrival order."""
    max_wait: Seconds | Literal["auto"] = "auto"
    """Nobody is overtaken for longer than this; `auto` follows the load."""
    linger: Seconds | Literal["auto"] = "auto"
    """How long a freed slot is held for the next turn of its own conversation; `auto` learns it."""
    max_queue: int = Field(default=1024, ge=1, le=1_000_000)
    """Requests that may wait in the pool; the next one is answered with 429."""


_OF_ALL = frozenset({"name", "url"})
_SOURCES = frozenset({"api_key", "api_key_env", "api_key_file"})
_OF_REMOTE = frozenset({"tls_ca"})
_TOLD = frozenset({"cache_ram", "kv_unified"})
"""Of a backend elsewhere not set, but told of it."""


class Backend(Section):
    """One llama-server: launched here (`model`) or already running elsewhere (`url`)."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["model"]}, {"required": ["url"]}]})

    name: str = Field(pattern=NAME_PATTERN)
    """Its name in metrics, headers and logs; unique in the file."""
    url: str | None = Field(default=None, pattern=URL_PATTERN)
    """Address of a llama-server that runs already; its slots and context are asked from it."""
    api_key: SecretStr | None = Field(default=None, min_length=1)
    """The key that this llama-server asks for (its `--api-key`), sent in place of the client's. One that is
    launched here is told of it by its environment, not on its command line."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """Environment variable that holds it."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """File that holds it (surrounding white space is dropped)."""
    tls_ca: str | None = Field(default=None, min_length=1)
    """File of certificates (PEM) by which an `https` address is trusted, in place of the system's."""
    kv_unified: bool = False
    """Whether the slots share one context (`--kv-unified`): any of them may fill it, a request waits that
    might not fit beside those that run, and all answers share one pass over the model, whichever slots they
    are on. Beside `url`: whether it is so (also of one that was started without `--parallel`); where that is
    not said, it is found out when the engine fails for lack of room."""
    model: str | None = Field(default=None, min_length=1)
    """The GGUF file to serve from a llama-server launched here, or `demo` for the bundled demo model."""
    engine: str | None = Field(default=None, min_length=1)
    """The engine of this backend alone; see the top-level `engine`."""
    slots: int = Field(default=4, ge=1, le=256)
    """Conversations that stay warm (`-np`)."""
    context: int = Field(default=4096, ge=256, le=16_777_216)
    """Tokens that one slot can hold (`-c` is slots × this)."""
    threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of the engine (`-t`); the engine's own choice where it is left out."""
    cpus: str | None = Field(default=None, pattern=CPUS_PATTERN)
    """CPUs that the engine may use, such as `0-7,16-23` (Linux); all of them where it is left out."""
    cache_ram: int = Field(default=0, ge=0, le=16_777_216)
    """MiB of host memory for the engine's own prompt cache (`--cache-ram`); 0 switches it off. Beside `url`,
    0 says that this llama-server runs with `--cache-ram 0`; `endpoint.isolation` asks for that."""
    args: tuple[str, ...] = ()
    """More llama-server flags, passed as they are."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables of the engine."""
    slot_save_path: str | None = Field(default=None, min_length=1)
    """Folder for saved slots (`--slot-save-path`). With it, what slots hold is saved at every stop and change
    and put back at the next start; it holds prompts as the engine keeps them. Without, slots start cold."""
    slot_save_size: Bytes = 8 * 2**30
    """Size of all saved slots of this backend; the least valuable go first."""
    slot_save_every: Seconds = 0.0
    """How often what is new in idle slots is saved, so that a crash leaves something to put back; a request
    that comes meanwhile waits for the one slot being saved. 0: only at stops and changes."""
    start_timeout: Seconds = 600.0
    """How long the engine may take until it is healthy, model loading included."""
    progress_timeout: Seconds = 300.0
    """How long an engine may be busy without progress, or not answer at all; then its requests are cancelled,
    and if that does not help it is started anew. One batch of prefill must take less; 0: for ever."""

    @model_validator(mode="after")
    def _model_or_url(self) -> Self:
        _reject(self._problems())
        return self

    def _problems(self) -> Iterator[Problem]:
        if self.model is None and self.url is None:
            yield Problem(
                (),
                "found neither model nor url, allowed: one of them",
            )
        elif self.url is not None:
            for other in sorted(self.model_fields_set - _OF_ALL - _OF_REMOTE - _SOURCES - _TOLD):
                message = "found beside url, allowed: only in a backend that is launched here"
                yield Problem((other,), message)
            if self.cache_ram:
                message = f"found {self.cache_ram} beside url, allowed: 0, which says that it has none"
                yield Problem(("cache_ram",), message)
            if self.tls_ca is not None and not self.url.startswith("https:"):
                yield Problem(("tls_ca",), "found beside an http address, allowed: beside an https one")
        else:
            for other in sorted(self.model_fields_set & _OF_REMOTE):
                yield Problem((other,), "found beside model, allowed: only beside url")
        sources = sorted(self.model_fields_set & _SOURCES)
        if len(sources) > 1:
            names = ", ".join(sorted(_SOURCES))
            yield Problem((sources[1],), f"found beside {sources[0]}, allowed: at most one of {names}")


class Pool(Section):
    """The backends that serve one model."""

    name: str = Field(pattern=POOL_PATTERN)
    """The model name that clients ask for; unique in the file."""
    aliases: tuple[Annotated[str, Field(pattern=POOL_PATTERN)], ...] = ()
    """Other model names that lead here."""
    default: bool = False
    """Requests that name no model, or one that no pool has, come here. Where no pool
    says so, the first one takes those that name none; an unknown model is answered with 404."""
    scheduling: Scheduling = Scheduling()
    """How this pool's requests are ordered and how many run at once."""
    masks: tuple[str, ...] = ()
    """Regular expressions of volatile text in prompts (a clock, a nonce line) that is left out when prompts
    are compared. The engine still computes it and what follows."""
    sort_tools: bool = False
    """Sort the tools of every request by name before it is sent, for clients that send them in any order."""
    warm_up: tuple[str, ...] = ()
    """Files, each a request body (JSON with `messages` or `prompt`) whose prompt is prefilled after a start,
    while nobody wants anything."""
    warm_up_learned: int = Field(default=0, ge=0, le=64)
    """So many prefixes that several of the last conversations shared are prefilled as well when an engine was
    started anew. Their text is kept in memory only; not with `masks` or `endpoint.isolation`."""
    backends: tuple[Backend, ...] = Field(min_length=1)
    """The servers of this pool."""

    @model_validator(mode="after")
    def _masks_are_patterns(self) -> Self:
        _reject(self._problems())
        return self

    def _problems(self) -> Iterator[Problem]:
        for index, mask in enumerate(self.masks):
            try:
                empty = re.compile(mask.encode(), re.MULTILINE).fullmatch(b"")
            except re.error as error:
                yield Problem(("masks", index), f"found a pattern that is wrong ({error}), allowed: Python's")
                continue
            if empty:
                yield Problem(
                    ("masks", index), "found a pattern of nothing, allowed: one that needs a character"
                )


class Listen(Section):
    """Where the router serves."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to bind."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    public: bool = False
    """Says that an address reachable from elsewhere is meant to be served without keys."""


class Key(Section):
    """One bearer key. Its secret stands in the file, in the environment or in a file of its own."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [source]} for source in ("value", "env", "file")]}
    )

    name: str = Field(pattern=NAME_PATTERN)
    """Name of its holder, in metrics; unique in the file."""
    value: SecretStr | None = Field(default=None, min_length=1)
    """The secret itself. Always set once the file is read."""
    env: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the secret."""
    file: str | None = Field(default=None, min_length=1)
    """File that holds the secret (surrounding white space is dropped)."""
    use: Literal["all", "requests", "admin"] = "all"
    """What it opens: everything, requests to models only, or only metrics, slots, adapters
    and the live page."""
    in_flight: int | None = Field(default=None, ge=1, le=1_000_000)
    """Requests of this key that may run at once; further ones wait."""
    queued: int | None = Field(default=None, ge=0, le=1_000_000)
    """Requests of this key that may wait because of `in_flight`; the next one is answered with 429."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [source for source in ("value", "env", "file") if getattr(self, source) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "no secret"
            _reject(iter([Problem((), f"found {found}, allowed: exactly one of value, env, file")]))
        return self


class Limits(Section):
    """Bounds that keep one client from hurting the others."""

    max_body: Bytes = 32 * 2**20
    """Largest request body; a larger one is answered with 413."""
    header_timeout: Seconds = 30.0
    """How long a client may take to send the head of a request, from its connection or first byte on; then
    the connection is closed, with 408 where the head has begun. 0: for ever."""
    body_timeout: Seconds = 30.0
    """How long a client may take to send its body; then it is answered with 408."""
    hold_timeout: Seconds = 60.0
    """How long requests are held while no backend of their pool is up; then they are answered with 503."""
    request_timeout: Seconds = 3600.0
    """Longest life of a request, waiting included; then it ends with 504 or an error event."""
    drain_timeout: Seconds = 30.0
    """How long running requests may take to end when warmslot stops."""
    ping_interval: Seconds = 15.0
    """A stream that has been silent for this long gets an SSE comment; 0 switches that off."""


class Endpoint(Section):
    """What clients may ask for beyond generating text, and what they may learn of each other."""

    unknown_routes: Literal["pass", "refuse"] = "pass"
    """Routes that the router does not know are passed to a backend, or answered with 404."""
    slot_actions: bool = False
    """Whether clients may save, restore and erase slots."""
    client_slots: bool = False
    """Whether a client's own `id_slot` is honoured; else it is overwritten."""
    isolation: bool = False
    """Clients with different keys share no prefixes, so that nobody learns by timing what others ask. No
    backend may have a `cache_ram` then: the engine would reuse from it whatever matches."""
    cors_origins: tuple[Annotated[str, Field(pattern=ORIGIN_PATTERN)], ...] = ()
    """Origins of web pages whose scripts may read answers in a browser (`https://chat.example.org`, without
    a path), or `*` for those of every page. Left empty: of none."""


class Journal(Section):
    """The record of finished requests that `warmslot report`, `explain` and `advise` read."""

    path: str | None = Field(default=None, min_length=1)
    """File to write; without it no journal is kept. Its folder must exist."""
    file_size: Bytes = Field(default=64 * 2**20, ge=2**16)
    """Size at which a file is put aside (as `PATH.1`, the oldest with the highest number)."""
    files: int = Field(default=8, ge=1, le=1000)
    """Files kept, the current one included; all of them together stay below `files` × `file_size`."""
    sync: Seconds = 5.0
    """Lines go to the operating system at once, and are forced to disk at least this often."""
    text: bool = False
    """Keep the text of prompts and answers as well. Without it the journal holds hashes and numbers only."""


class Advice(Section):
    """What `warmslot advise` says of the journal as it grows; without a journal there is none."""

    every: Seconds = 900.0
    """How often that is worked out anew, at most; 30 more requests are needed each time. A process of its own
    does it, at the lowest priority. 0: never."""
    latest: int = Field(default=20_000, ge=100, le=1_000_000)
    """So many of the latest requests in the journal are looked at."""


class State(Section):
    """What outlasts a run: which engines run, their logs, and the socket that `warmslot status` asks."""

    path: str | None = Field(default=None, min_length=1)
    """Its folder, of one running warmslot at a time. Left out: one for each configuration file, under
    `$STATE_DIRECTORY` (systemd), `$XDG_STATE_HOME/warmslot` or `~/.local/state/warmslot`."""
    outlive: bool = False
    """Whether engines live on when warmslot is killed, to be taken over by its next start with all that they
    hold; else they end with it."""
    log_size: Bytes = Field(default=16 * 2**20, ge=2**16)
    """Size at which an engine's log is put aside (as `NAME.log.1`, the oldest with the highest number)."""
    log_files: int = Field(default=4, ge=1, le=1000)
    """Log files kept of each engine, the current one included."""


class Config(Section):
    """The whole file."""

    listen: Listen = Listen()
    """Where the router serves."""
    engine: str | None = Field(default=None, min_length=1)
    """Path or command of a llama-server, or `embedded` (xllamacpp); searched for where it is left out."""
    load_at_once: int = Field(default=2, ge=1, le=256)
    """Engines that load at the same time; the others wait their turn instead of reading all at once."""
    keys: tuple[Key, ...] = ()
    """Bearer keys, one of which every request must carry; none means that no key is asked for."""
    limits: Limits = Limits()
    """Bounds that keep one client from hurting the others."""
    endpoint: Endpoint = Endpoint()
    """What clients may ask for."""
    journal: Journal = Journal()
    """The record of finished requests."""
    advice: Advice = Advice()
    """What `warmslot_advised_slots`, the live page and `warmslot status` say of the number of slots."""
    state: State = State()
    """What outlasts a run."""
    ui: bool = True
    """Whether the live page is served at `/ui`. Its data asks for a key where keys are configured."""
    pools: tuple[Pool, ...] = Field(min_length=1)
    """The models that are served."""

    @property
    def default_pool(self) -> Pool:
        """The pool of requests that name no model: the one that says so, else the first."""
        return next((pool for pool in self.pools if pool.default), self.pools[0])

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _reject(self._problems())
        return self

    def _problems(self) -> Iterator[Problem]:
        if not self.keys and not self.listen.public and not _is_loopback(self.listen.host):
            yield Problem(
                ("listen", "host"),
                f'found "{self.listen.host}" without keys, '
                "allowed: a loopback address, or keys, or listen.public: true",
            )
        yield from _twice((("keys", i, "name"), key.name) for i, key in enumerate(self.keys))
        yield from _twice(self._pool_names())
        yield from _twice(
            (("pools", i, "backends", j, "name"), backend.name)
            for i, pool in enumerate(self.pools)
            for j, backend in enumerate(pool.backends)
        )
        if self.endpoint.isolation:
            yield from self._shared_caches()
        defaults = [i for i, pool in enumerate(self.pools) if pool.default]
        for i in defaults[1:]:
            first = self.pools[defaults[0]].name
            yield Problem(
                ("pools", i, "default"), f"found true as in pool {first}, allowed: one default pool"
            )

    def _shared_caches(self) -> Iterator[Problem]:
        for i, pool in enumerate(self.pools):
            for j, backend in enumerate(pool.backends):
                place = ("pools", i, "backends", j)
                if backend.url is not None and "cache_ram" not in backend.model_fields_set:
                    yield Problem(
                        (*place, "url"),
                        "found without cache_ram beside endpoint.isolation, "
                        "allowed: with cache_ram: 0, where it runs with --cache-ram 0",
                    )
                elif backend.url is None and backend.cache_ram:
                    yield Problem(
                        (*place, "cache_ram"),
                        f"found {backend.cache_ram} beside endpoint.isolation, allowed: 0",
                    )

    def _pool_names(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for i, pool in enumerate(self.pools):
            yield ("pools", i, "name"), pool.name
            for j, alias in enumerate(pool.aliases):
                yield ("pools", i, "aliases", j), alias


def _twice(named: Iterator[tuple[tuple[str | int, ...], str]]) -> Iterator[Problem]:
    seen: set[str] = set()
    for path, name in named:
        if name in seen:
            yield Problem(path, f'found "{name}" a second time, allowed: a name of its own')
        seen.add(name)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
