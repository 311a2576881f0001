"""The commands that look at a journal or a running router: report, explain, check, advise, top, journal.

Imports stand inside the commands, so that each starts fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console

Source = Annotated[
    str,
    typer.Argument(
        metavar="JOURNAL|URL",
        help="A journal's path, or the address of a running router.",
        show_default=False,
    ),
]
JournalFile = Annotated[Path, typer.Argument(metavar="JOURNAL", help="A journal's path.", show_default=False)]
Key = Annotated[
    str | None,
    typer.Option(envvar="WARMSLOT_KEY", help="Bearer key of the running router.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(report)


def report(
    source: Source,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write one page with charts instead.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    since: Annotated[
        str | None,
        typer.Option(help="Requests from here on: a time (2026-01-31T12:00), or an age (90m, 2h, 3d)."),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Requests before this; as --since.")] = None,
    key: Key = None,
) -> None:
    """Reuse, losses and why, prefill curve, decode rates, waits and concurrency of a window."""
    from warmslot.router.journal import JournalError

    from .live import LiveError
    from .report import load, show
    from .report_html import page
    from .summary import as_json as to_json

    window = (_moment(since, "--since"), _moment(until, "--until"))
    with _progress("reading") as progress:
        try:
            summary, reading = load(source, key=key, since=window[0], until=window[1], progress=progress)
        except (JournalError, LiveError) as error:
            _fail(str(error))
    if as_json:
        _print_json(to_json(summary))
    if html is not None:
        try:
            html.write_text(page(summary), encoding="utf-8")
        except OSError as error:
            _fail(f"{html}: {error.strerror or error}")
        typer.echo(f"wrote {html}", err=True)
    elif not as_json:
        show(_console(), summary, reading)


# -- shared ------------------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, markup=True, emoji=False)


def _print_json(value: object) -> None:
    import orjson

    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def _progress(what: str) -> AbstractContextManager[Callable[[int], None]]:
    """A line on a terminal's standard error that counts; nothing elsewhere."""
    from contextlib import contextmanager

    from rich.console import Console

    @contextmanager
    def counting() -> Iterator[Callable[[int], None]]:
        console = Console(stderr=True)
        if not console.is_terminal:
            yield lambda _: None
            return
        with console.status(f"{what} …") as status:
            yield lambda count: status.update(f"{what} … {count:,} lines")

    return counting()


def _moment(text: str | None, option: str) -> float | None:
    """A Unix time from a date or from an age."""
    import re
    import time
    from datetime import datetime

    if text is None:
        return None
    age = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text)
    if age:
        return time.time() - float(age[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[age[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: expected a time such as 2026-01-31T12:00, or an age such as 90m", param_hint=option
        ) from None
