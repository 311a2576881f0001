"""Reads the configuration file: YAML with line numbers, and one clear line for every setting that is wrong.

A line reads ``FILE:LINE: pools[0].backends[1].slots: found "four", allowed: an integer from 1 to 256``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import SecretStr, ValidationError

from .config import Backend, Config, Key
from .config_schema import Schema, allowed, child, members, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from .config_schema import Path as Steps

_FOUND_LIMIT = 80
_HIDDEN = "**********"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SECRET = re.compile(r"^keys\[\d+\]\.value$|^pools\[\d+\]\.backends\[\d+\]\.api_key$")


class ConfigError(Exception):
    """The file cannot be used. ``lines`` holds one line for every setting that is wrong, at least one."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def load(path: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Config:
    """Read, validate and complete a configuration file.

    Relative paths in it (``model``, ``engine`` with a slash, ``slot_save_path``, ``state.path``,
    ``keys[].file``, ``api_key_file``, ``tls_ca``) start at its own folder. Every key's ``value`` is set in
    the result, and the ``api_key`` of every backend that has one.
    Raises :class:`ConfigError`.
    """
    file = os.fspath(path)
    return _complete(*parse(_read(file), file), Path(file).parent, env)


def locate(path: str | os.PathLike[str]) -> Callable[[Steps, str], str]:
    """A function that puts file, line and name of a setting before what is said of it.

    Raises :class:`ConfigError`.
    """
    file = os.fspath(path)
    return _Document(_read(file), file).error


def _read(file: str) -> str:
    try:
        return Path(file).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{file}: found bytes that are not UTF-8 (at {error.start}), allowed: UTF-8 text"]
        ) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError([f"{file}: {reason}, allowed: a readable YAML file"]) from None


def parse(text: str, file: str = "config") -> tuple[Config, _Document]:
    """Validate the text of a configuration file; nothing outside the text is looked at."""
    document = _Document(text, file)
    try:
        content = json.dumps(document.data, default=str)
    except (ValueError, RecursionError):
        raise ConfigError([f"{file}:1: found a section that contains itself, allowed: plain YAML"]) from None
    try:
        # JSON, because strict validation of it takes lists and keeps "8080" and true apart from 8080 and 1.
        return Config.model_validate_json(content, strict=True), document
    except ValidationError as error:
        found = dict.fromkeys(_errors(error, document))
        found_in_order = sorted(found, key=lambda item: document.line(item[0]))
        raise ConfigError([document.error(path, message) for path, message in found_in_order]) from None


def dotted(path: Steps) -> str:
    """``pools[0].name`` for ``("pools", 0, "name")``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


_INTEGER = "tag:yaml.org,2002:int"
_NUMBERS = frozenset({_INTEGER, "tag:yaml.org,2002:float"})
_OCTAL = re.compile(r"^[-+]?0[0-9_]+$")
_MOST_SETTINGS = 20_000
"""A file of a few lines can stand for billions of settings, by aliases of aliases."""


class _Document:
    """A YAML document: its plain data, and the line of each setting."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._lines: dict[Steps, int] = {(): 1}
        self._surprising: list[tuple[yaml.ScalarNode, Steps]] = []
        """Numbers that YAML 1.1 reads otherwise than people do: 010 as 8, 1:30 as 90."""
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                self._locate(node, (), frozenset())
            if self._surprising:
                raise ConfigError([self._surprise(*one, loader) for one in self._surprising])
            self.data = None if node is None else loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = "" if mark is None else f":{mark.line + 1}"
            raise ConfigError([f"{file}{line}: not YAML: {error.problem or error.context}"]) from None
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError([f"{file}:1: not YAML: {reason}"]) from None
        finally:
            loader.dispose()
        if self.data is None:
            raise ConfigError(
                [f"{file}:1: found nothing, allowed: at least pools (see configs/example.yaml)"]
            )

    def line(self, path: Steps) -> int:
        """The line of a setting, or of the innermost section around it that is in the file."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def at(self, path: Steps) -> Any:
        """The value that the file has there; ``None`` where it has none."""
        value: Any = self.data
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def error(self, path: Steps, message: str) -> str:
        """One line about a setting."""
        place = dotted(path)
        return (
            f"{self.file}:{self.line(path)}: {place}: {message}"
            if place
            else f"{self.file}:{self.line(path)}: {message}"
        )

    def _locate(self, node: yaml.Node, path: Steps, above: frozenset[int]) -> None:
        if id(node) in above:
            return
        if len(self._lines) > _MOST_SETTINGS:
            found = f"found more than {_MOST_SETTINGS:,} settings (aliases within aliases?)"
            raise ConfigError([self._at_mark(node, path, f"{found}, allowed: at most that many")])
        above |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                here = (*path, name)
                if not isinstance(key, yaml.ScalarNode) or key.tag not in {
                    "tag:yaml.org,2002:str",
                    "tag:yaml.org,2002:merge",
                }:
                    raise ConfigError(
                        [self._at_mark(key, path, "found a name that is not text, allowed: a setting's name")]
                    )
                if name in seen:
                    raise ConfigError([self._at_mark(key, here, "found a second time, allowed: once")])
                seen.add(name)
                self._lines[here] = key.start_mark.line + 1
                self._locate(value, here, above)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[(*path, index)] = item.start_mark.line + 1
                self._locate(item, (*path, index), above)
        elif (
            isinstance(node, yaml.ScalarNode)
            and node.tag in _NUMBERS
            and (":" in node.value or _OCTAL.match(node.value))
        ):
            self._surprising.append((node, path))

    def _surprise(self, node: yaml.ScalarNode, path: Steps, loader: yaml.SafeLoader) -> str:
        integer = node.tag == _INTEGER
        reads = loader.construct_yaml_int(node) if integer else loader.construct_yaml_float(node)
        base = "in sixties" if ":" in node.value else "as an octal number"
        setting = _place(path)[1]
        words = f"{allowed(setting)}, " if setting else ""
        found = f"found {node.value}, which YAML reads {base}, as {reads:g}"
        return self._at_mark(
            node, path, f"{found}, allowed: {words}numbers in decimal digits, texts in quotes"
        )

    def _at_mark(self, node: yaml.Node, path: Steps, message: str) -> str:
        place = dotted(path)
        return f"{self.file}:{node.start_mark.line + 1}: " + (f"{place}: {message}" if place else message)


def _errors(error: ValidationError, document: _Document) -> Iterator[tuple[Steps, str]]:
    for item in error.errors(include_url=False):
        path, node = _place(item["loc"])
        kind = item["type"]
        if kind == "problems":
            for problem in item["ctx"]["problems"]:
                yield (*path, *problem.path), problem.message
        elif kind == "extra_forbidden":
            yield path, "unknown setting" + _suggestion(str(path[-1]), path[:-1])
        elif kind == "too_short" and document.at(path):
            continue  # its items are wrong, and have lines of their own
        elif kind == "missing":
            yield path, f"missing, required: {allowed(node)}"
        else:
            yield path, f"found {_found(document.at(path), path)}, allowed: {_allowed(node, kind)}"


def _place(loc: tuple[str | int, ...]) -> tuple[Steps, Schema]:
    """The setting that an error is about: its location less the branches of unions, and its schema."""
    node = schema()
    path: Steps = ()
    for number, step in enumerate(loc):
        inner = child(node, step)
        if inner is None:
            # An unknown setting is the last step of its path; anything else is a union's branch.
            return ((*path, step), {}) if number == len(loc) - 1 and members(node) else (path, node)
        node, path = inner, (*path, step)
    return path, node


def _allowed(node: Schema, kind: str) -> str:
    return "at least one" if kind == "too_short" else allowed(node)


def _suggestion(name: str, path: Steps) -> str:
    _, section = _place(path)
    names = members(section)
    close = difflib.get_close_matches(name.replace("-", "_"), names, n=1)
    return f", did you mean {close[0]}?" if close else ", allowed: " + ", ".join(names)


def _found(value: Any, path: Steps) -> str:
    if _SECRET.match(dotted(path)):
        return "a value that is not shown"
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _FOUND_LIMIT else text[:_FOUND_LIMIT] + '…"'


def _complete(config: Config, document: _Document, folder: Path, env: Mapping[str, str]) -> Config:
    """Resolve what the text only points to: secrets of keys, relative paths."""
    errors: list[str] = []
    keys: list[Key] = []
    for index, key in enumerate(config.keys):
        try:
            secret = _secret(key.value, key.env, key.file, folder, env)
            keys.append(key.model_copy(update={"value": secret}))
        except ConfigError as error:
            errors.append(document.error(("keys", index, _source(key)), str(error)))
    errors += [document.error(path, message) for path, message in _shared_secrets(keys, config)]
    pools = []
    for number, pool in enumerate(config.pools):
        backends = []
        for index, backend in enumerate(pool.backends):
            try:
                backends.append(_with_access(_with_paths(backend, folder), folder, env))
            except _SettingError as error:
                place = ("pools", number, "backends", index, error.setting)
                errors.append(document.error(place, str(error)))
        warm_up = tuple(_path(file, folder) for file in pool.warm_up)
        pools.append(pool.model_copy(update={"backends": tuple(backends), "warm_up": warm_up}))
    if errors:
        raise ConfigError(errors)
    update: dict[str, object] = {
        "keys": tuple(keys),
        "pools": tuple(pools),
        "engine": _command(config.engine, folder),
    }
    if config.journal.path is not None:
        path = _path(config.journal.path, folder)
        update["journal"] = config.journal.model_copy(update={"path": path})
    if config.state.path is not None:
        update["state"] = config.state.model_copy(update={"path": _path(config.state.path, folder)})
    return config.model_copy(update=update)


def _shared_secrets(keys: list[Key], config: Config) -> Iterator[tuple[Steps, str]]:
    """Of keys with the same secret nobody could tell whose request it is; ``keys`` have theirs."""
    holders: dict[str, str] = {}
    places = {key.name: ("keys", index, _source(key)) for index, key in enumerate(config.keys)}
    for key in keys:
        if key.value is None:
            continue
        holder = holders.setdefault(key.value.get_secret_value(), key.name)
        if holder != key.name:
            yield (
                places[key.name],
                f"found for {key.name} the secret of {holder}, allowed: a secret of its own",
            )


def _source(key: Key) -> str:
    return "env" if key.env is not None else "file" if key.file is not None else "value"


class _SettingError(ConfigError):
    """One setting of a backend points to something that cannot be had."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__([message])
        self.setting = setting


def _with_access(backend: Backend, folder: Path, env: Mapping[str, str]) -> Backend:
    """With what it takes to be let in by its llama-server."""
    update: dict[str, object] = {}
    sources = backend.api_key, backend.api_key_env, backend.api_key_file
    if any(source is not None for source in sources):
        try:
            update["api_key"] = _secret(*sources, folder, env)
        except ConfigError as error:
            names = ("api_key", "api_key_env", "api_key_file")
            name = next(name for name, given in zip(names, sources, strict=True) if given is not None)
            raise _SettingError(name, str(error)) from None
    if backend.tls_ca is not None:
        file = update["tls_ca"] = _path(backend.tls_ca, folder)
        try:
            ssl.create_default_context(cafile=file)
        except OSError as error:  # of which SSLError is one
            reason = "no certificates" if isinstance(error, ssl.SSLError) else error.strerror
            message = f'found "{backend.tls_ca}" ({reason}), allowed: a readable PEM file of certificates'
            raise _SettingError("tls_ca", message) from None
    return backend.model_copy(update=update)


def _secret(
    value: SecretStr | None, variable: str | None, file: str | None, folder: Path, env: Mapping[str, str]
) -> SecretStr:
    """A secret that the file holds, or points to by a variable or another file."""
    if value is not None:
        secret = value.get_secret_value()
    elif variable is not None:
        if variable not in env:
            raise ConfigError(
                [f'found "{variable}", which is not set, allowed: a variable that holds the key']
            )
        secret = env[variable]
    else:
        file = str(file)
        try:
            secret = (folder / Path(file).expanduser()).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(
                [f'found "{file}" ({reason}), allowed: a readable file that holds the key']
            ) from None
    if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(
            ["found a secret that no HTTP header can carry, allowed: printable ASCII without spaces"]
        )
    return SecretStr(secret)


def _with_paths(backend: Backend, folder: Path) -> Backend:
    update: dict[str, str | None] = {"engine": _command(backend.engine, folder)}
    if backend.model is not None and backend.model != "demo":
        update["model"] = _path(backend.model, folder)
    if backend.slot_save_path is not None:
        update["slot_save_path"] = _path(backend.slot_save_path, folder)
    return backend.model_copy(update=update)


def _command(engine: str | None, folder: Path) -> str | None:
    return (
        _path(engine, folder) if engine is not None and ("/" in engine or engine.startswith("~")) else engine
    )


def _path(text: str, folder: Path) -> str:
    return str((folder / Path(text).expanduser()).absolute())


def dump(config: Config) -> str:
    """A configuration as YAML with all defaults filled in. Secrets are hidden, absent values left out."""
    data = config.model_dump(mode="json", exclude_none=True)
    for key in data["keys"]:
        if "env" in key or "file" in key:
            del key["value"]
    for pool, given in zip(data["pools"], config.pools, strict=True):
        pool["backends"] = [
            _shown(backend, one.model_fields_set)
            for backend, one in zip(pool["backends"], given.backends, strict=True)
        ]
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
    return text


def _shown(backend: dict[str, Any], given: AbstractSet[str]) -> dict[str, Any]:
    if "api_key_env" in backend or "api_key_file" in backend:
        backend.pop("api_key", None)
    if "url" in backend:
        names = ("name", "url", "api_key", "api_key_env", "api_key_file", "tls_ca", "kv_unified", "cache_ram")
        return {name: backend[name] for name in names if name in backend and name in given}
    backend["env"] = {
        name: _HIDDEN if _SECRET_NAME.search(name) else value for name, value in backend["env"].items()
    }
    return backend
