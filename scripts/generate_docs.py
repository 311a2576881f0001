"""Generates the reference pages and the JSON schema from the code that they describe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.main import get_command
from warmslot.launcher.cli import app
from warmslot.router.config_schema import schema_text, settings
from warmslot.router.metrics import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOP = Path(__file__).resolve().parent.parent


def configuration_page() -> str:
    """``docs/configuration.md``."""
    rows = [
        _row(f"`{setting.path}`", setting.allowed, f"`{setting.default}`", setting.text)
        for setting in settings()
    ]
    return f"""# Configuration

One YAML file, given to `warmslot up FILE`. `warmslot config check FILE` says what is wrong with it, one line
for each setting, and exits with 2; and what it names that is not on this machine (models, engines and flags
that they lack, folders that cannot be written), and exits with 1. `warmslot config show FILE` prints it with
all defaults filled in.
Editors that know `configs/warmslot.schema.json` complete and check it: see the first line of
`configs/example.yaml`, where every setting stands with a comment.

Durations are seconds (`30`) or text (`"500ms"`, `"30s"`, `"5m"`, `"1h"`); sizes are bytes or text
(`"32MiB"`).
Relative paths start at the file's own folder. A backend has either a `model` (a llama-server is launched for
it) or a `url` (a llama-server that runs already; beside its name only what it takes to
be let in: `api_key…`, `tls_ca`; and `cache_ram: 0` and `kv_unified: true`, where that is so).

| setting | allowed | default | meaning |
|---|---|---|---|
{chr(10).join(rows)}
"""


def metrics_page() -> str:
    """``docs/metrics.md``."""
    rows = [
        _row(f"`warmslot_{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.text)
        for one in catalogue()
    ]
    return f"""# Metrics

`GET /metrics` answers with the router's own metrics in Prometheus' text format,
`GET /backends/NAME/metrics` with those of one engine as they come from it. Where keys are configured, both
ask for one.

Units are base units and stand in the name: `seconds`, `tokens`. Sums are exported, never a ratio: reuse is
`sum(rate(warmslot_prompt_tokens_total{{reuse="cached"}}[5m])) / sum(rate(warmslot_prompt_tokens_total[5m]))`,
which weighs requests by their tokens. Labels are bounded: names from the configuration and fixed words;
whatever else a client is called counts as `other`. No metric holds text of a prompt.

| metric | type | labels | meaning |
|---|---|---|---|
{chr(10).join(rows)}

## Dashboards and alerts

`dashboards/overview.json` and `dashboards/parallel.json` are for import into Grafana 10.4 or newer.
`dashboards/generate.py` writes them. `configs/prometheus/` has a scrape configuration, recording rules and
alerts; `configs/grafana/` provisions data source and dashboards. For a router on the same host,
`docker compose -f configs/grafana/compose.yaml up` brings up Prometheus and Grafana with all of it.

Drawn with Grafana's own components from three minutes of `warmslot up` with two demo engines
(`python dashboards/draw/demo.py docs/img --minutes 3`):

![Overview](img/overview.png)

![What slot count?](img/parallel.png)
"""


def cli_page() -> str:
    """``docs/cli.md``."""
    top = get_command(app)
    parts = [_command("warmslot", top), *_commands("warmslot", top)]
    return f"""# Command line

Every command has `--help`. Exit codes: 0 done, 1 failed, 2 wrong usage or wrong configuration;
`warmslot up` ends with 128 and the signal's number when a second signal cut it short.

{chr(10).join(parts)}"""


def _commands(prefix: str, group: Any) -> Iterator[str]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        path = f"{prefix} {name}"
        yield _command(path, command)
        if hasattr(command, "list_commands"):
            yield from _commands(path, command)


def _command(path: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    words = [path, *(["[OPTIONS]"] if options else []), *(_metavar(one) for one in arguments)]
    if hasattr(command, "list_commands"):
        words.append("COMMAND")
    lines = [f"## `{path}`", "", str(command.help).strip(), "", f"`{' '.join(words)}`", ""]
    rows = [_row(f"`{_metavar(one)}`", _help(one)) for one in arguments]
    rows += [_row(_names(one), _help(one)) for one in options]
    if rows:
        lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _metavar(argument: Any) -> str:
    name: str = argument.metavar or argument.name.upper()
    return name if argument.nargs == 1 else f"{name}..."


def _names(option: Any) -> str:
    """``--drafts / --no-drafts`` for what is on or off."""
    sides = [side for side in (option.opts, option.secondary_opts) if side]
    return " / ".join(", ".join(f"`{name}`" for name in side) for side in sides)


def _help(parameter: Any) -> str:
    text: str = parameter.help or ""
    if getattr(parameter, "secondary_opts", None):
        text += f" Default: `{(parameter.opts if parameter.default else parameter.secondary_opts)[0]}`."
    if isinstance(parameter.default, str | int | float) and not isinstance(parameter.default, bool):
        text += f" Default: `{parameter.default}`."
    return text


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


PAGES: dict[str, Callable[[], str]] = {
    "configs/warmslot.schema.json": schema_text,
    "docs/cli.md": cli_page,
    "docs/configuration.md": configuration_page,
    "docs/metrics.md": metrics_page,
}


def main() -> int:
    """Write every page, or with ``--check`` name those that are out of date."""
    check = "--check" in sys.argv[1:]
    stale = 0
    for name, generate in PAGES.items():
        file, text = TOP / name, generate()
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if check:
            sys.stderr.write(f"{name} is out of date: run scripts/docs\n")
        else:
            file.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {name}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
