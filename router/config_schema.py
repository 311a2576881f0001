"""The configuration model in words: JSON schema, list of settings, what a setting allows.

Error messages, the schema that editors use and ``docs/configuration.md`` all come from here.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from .config import DURATION_PATTERN, NAME_PATTERN, POOL_PATTERN, SIZE_PATTERN, URL_PATTERN, Config

Schema = dict[str, Any]
Path = tuple[str | int, ...]

_PATTERN_WORDS = {
    NAME_PATTERN: "a name of letters, digits, _ . - (63 at most)",
    POOL_PATTERN: "a model name of letters, digits, _ . : / - (127 at most)",
    URL_PATTERN: "http://HOST:PORT without a path",
    DURATION_PATTERN: 'a duration such as "500ms", "30s", "5m", "1h"',
    SIZE_PATTERN: 'a size such as "512KiB", "32MiB", "1GB"',
}


class Setting(NamedTuple):
    """One setting of the file, as documentation shows it."""

    path: str
    """Such as ``pools[].backends[].slots``."""
    allowed: str
    default: str
    """JSON, or ``required``."""
    text: str


@lru_cache(maxsize=1)
def schema() -> Schema:
    """The JSON schema (draft 2020-12) of the configuration file."""
    generated = Config.model_json_schema(mode="validation")
    # A key's secret is a password to pydantic; in a file it is plain text.
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **generated,
        "title": "warmslot configuration",
    }


def schema_text() -> str:
    """The schema file's content."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def child(node: Schema, step: str | int) -> Schema | None:
    """The schema of one member of an object or array schema; ``None`` where it has no such member."""
    node = _resolved(node)
    if isinstance(step, int):
        items: Schema | None = node.get("items")
        return items
    named: Schema | None = node.get("properties", {}).get(step)
    if named is None and isinstance(node.get("additionalProperties"), dict):
        extra: Schema = node["additionalProperties"]
        return extra
    return named


def members(node: Schema) -> list[str]:
    """Names of the settings of an object schema."""
    return list(_resolved(node).get("properties", {}))


def allowed(node: Schema) -> str:
    """What a setting may be, in words: ``an integer from 1 to 256``."""
    node = _resolved(node)
    if "anyOf" in node:
        options = [allowed(option) for option in node["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "const" in node:
        return json.dumps(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(str(value) for value in node["enum"])
    return _allowed_type(node)


def _allowed_type(node: Schema) -> str:
    kind = node.get("type")
    if kind == "array":
        item = _resolved(node["items"])
        return "a list of sections" if item.get("type") == "object" else f"a list, each {allowed(item)}"
    words = {"boolean": "true or false", "object": "a section", "string": "text"}
    if kind in {"integer", "number"}:
        return ("an integer" if kind == "integer" else "a number") + _range(node)
    if kind == "object" and "properties" not in node:
        return "a section of names and texts"
    return _PATTERN_WORDS.get(node.get("pattern", ""), words[str(kind)])


def settings() -> list[Setting]:
    """Every setting of the file in the order of the model, sections left out."""
    return _settings(schema(), "")


def _settings(node: Schema, prefix: str) -> list[Setting]:
    node = _resolved(node)
    found: list[Setting] = []
    for name, member in node["properties"].items():
        path, inner = prefix + name, _resolved(member)
        if inner.get("type") == "array" and "properties" in _resolved(inner["items"]):
            found += _settings(inner["items"], path + "[].")
        elif "properties" in inner:
            found += _settings(inner, path + ".")
        else:
            required = name in node.get("required", [])
            default = "required" if required else json.dumps(member.get("default", {}), ensure_ascii=False)
            found.append(Setting(path, allowed(member), default, member.get("description", "")))
    return found


def _resolved(node: Schema) -> Schema:
    if "$ref" in node:
        target: Schema = schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return target
    return node


def _range(node: Schema) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f" of at least {low}" if low is not None else ""
