"""The commands that look at a journal or a running router: report, explain, check, advise, top, journal.

Imports stand inside the commands, so that each starts fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console
    from warmslot.router.journal import Reading

    from .forecast import Setup

Source = Annotated[
    str,
    typer.Argument(
        metavar="JOURNAL|URL",
        help="A journal's path, or the address of a running router.",
        show_default=False,
    ),
]


def _a_file(path: Path) -> Path:
    if path.parts[:1] in {("http:",), ("https:",)}:
        raise typer.BadParameter(
            "found an address, allowed: a journal's path (a router writes one where journal.path is set)"
        )
    return path


JournalFile = Annotated[
    Path,
    typer.Argument(metavar="JOURNAL", help="A journal's path.", show_default=False, callback=_a_file),
]
Key = Annotated[
    str | None,
    typer.Option(envvar="WARMSLOT_KEY", help="Bearer key of the running router.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


journal_app = typer.Typer(help="Scrubs, exports or imports journals.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(report)
    app.command()(explain)
    app.command()(check)
    app.command()(advise)
    app.command()(top)
    app.add_typer(journal_app, name="journal")


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


def explain(
    journal: JournalFile,
    request: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A request's id, or its beginning.", show_default=False),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="The last request of this session.", show_default=False)
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The last request of all.")] = False,
    as_json: AsJson = False,
) -> None:
    """What was predicted, chosen and observed for a request, and where its prompt stopped matching."""
    from warmslot.router.journal import JournalError

    from . import explain as explaining

    if (request is not None) + (session is not None) + last != 1:
        raise typer.BadParameter("give one of: an ID, --session, --last")
    try:
        found = explaining.explain(journal, request=request, session=session, last=last)
    except (JournalError, explaining.NotFoundError) as error:
        _fail(str(error))
    if as_json:
        _print_json(explaining.as_json(found))
    else:
        explaining.show(_console(), found)


def advise(
    journal: JournalFile,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=256,
            help="Tokens that all slots may hold together; else what they hold now.",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[
        str,
        typer.Option(
            help='Slot counts to choose from, as "1,2,4,8"; else all that the load may need.',
            show_default=False,
        ),
    ] = "",
    cache_ram: Annotated[
        int,
        typer.Option(min=256, help="MiB of the engine's prompt cache in host memory, where that is weighed."),
    ] = 8192,
    backend: Annotated[
        str, typer.Option(help="Of this backend; else of the busiest.", show_default=False)
    ] = "",
    latest: Annotated[
        int | None,
        typer.Option(
            min=30, help="Of so many of the latest requests in the journal; else of all.", show_default=False
        ),
    ] = None,
    copy: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Tokens/s that are copied to it or back, where the journal cannot tell.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        int, typer.Option(min=0, max=12, help="Start the best so many candidates and serve the load on them.")
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            help="The GGUF file, or demo: tells memory in bytes, and is what --measure serves.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="With --measure: path of a llama-server, or embedded.", show_default=False),
    ] = None,
    flags: Annotated[
        str, typer.Option(help="With --measure: more flags for the engine, as one text.", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """How many slots, and how many requests at once, from what a journal has measured."""
    import asyncio
    import shlex

    from warmslot.router.journal import JournalError

    from . import advise_measure, advise_show
    from .advise import AdviceError
    from .advise import advise as find
    from .engine import EngineError, find_engine
    from .host_memory import cache_for
    from .memory import PlanError, read_model
    from .model import ModelError, find_model

    if measure and model is None:
        raise typer.BadParameter("needs --model: the GGUF file to serve, or demo", param_hint="--measure")
    args = shlex.split(flags)
    measured: list[advise_measure.Measured] = []
    memory: Callable[[Setup], int] | None = None
    with _steps() as progress:
        try:
            path = None if model is None else find_model(model)
            facts = None if path is None else read_model(path)
            if facts is not None:
                memory = advise_measure.memory_of(facts, args)
            advice, reading = find(
                journal,
                kv_tokens=kv_tokens,
                slots=_counts(slots, "--slots"),
                host=cache_for(cache_ram, facts, args),
                copy=None if copy is None else 1 / copy,
                backend=backend,
                latest=latest,
                progress=progress,
            )
            if measure and path is not None:
                measured = asyncio.run(
                    advise_measure.measure(
                        advice,
                        advise_measure.contenders(advice, measure),
                        engine=find_engine(engine),
                        model=path,
                        args=args,
                        progress=progress,
                    )
                )
        except (
            *(JournalError, AdviceError, advise_measure.MeasureError),
            *(EngineError, ModelError, PlanError),
        ) as error:
            _fail(str(error))
    if as_json:
        found = advise_show.as_json(advice, memory)
        found["measured"] = advise_measure.as_json(measured)
        _print_json(found)
    else:
        advise_show.show(_console(), advice, memory)
        if measured:
            advise_measure.show(_console(), measured)
    if reading.skipped:
        typer.echo(f"{reading.skipped} lines were skipped, the first: {reading.why}", err=True)


def check(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            help="A llama-server that nobody else uses; else one is started.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The GGUF file, or demo.")] = "demo",
    engine: Annotated[
        str | None,
        typer.Option(
            help="Path of a llama-server, or embedded; searched for when left out.", show_default=False
        ),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, max=64, help="Answers at the same time.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of each answer.")] = 48,
    drafts: Annotated[bool, typer.Option(help="Check with speculative drafts as well.")] = True,
    flags: Annotated[
        str, typer.Option(help="More flags for the engine, as one text.", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Whether answers generated at once equal the same answers in turn, and what sharing a step costs."""
    import asyncio
    import shlex

    from . import check as checking
    from .engine import EngineError, find_engine
    from .model import ModelError, find_model

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        if url is not None:
            result = asyncio.run(checking.check_url(url, at_once, tokens, say))
        else:
            result = asyncio.run(
                checking.check_engine(
                    find_engine(engine),
                    find_model(model),
                    shlex.split(flags),
                    at_once=at_once,
                    tokens=tokens,
                    drafts=drafts,
                    say=say,
                )
            )
    except (checking.CheckError, EngineError, ModelError) as error:
        _fail(str(error))
    if as_json:
        _print_json(checking.as_json(result))
    else:
        checking.show(_console(), result)
    if not result.good:
        raise typer.Exit(1)


def bench_replay(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOAD",
            help="A journal, a recorded trace, or agents=12,turns=6,first=1000,growth=200,output=40.",
            show_default=False,
        ),
    ],
    targets: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]URL...", help="Servers with /v1/completions.", show_default=False),
    ],
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often each server is measured.")] = 3,
    live: Annotated[int, typer.Option(min=1, max=1024, help="Conversations at once, for traces.")] = 12,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many calls.", show_default=False)
    ] = None,
    pace: Annotated[float, typer.Option(min=0, max=100, help="Scales pauses between calls; 0: none.")] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(help="The model to ask for; else the first that a server lists.", show_default=False),
    ] = None,
    key: Key = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the figures and every call here.", show_default=False),
    ] = None,
) -> None:
    """Serve one load on several servers, in turn and again, and compare them with confidence intervals."""
    import asyncio
    from dataclasses import replace

    import orjson
    from warmslot.router.journal import JournalError

    from . import bench_replay as benching

    try:
        servers = [replace(benching.target(text), key=key) for text in targets]
        load, texts = benching.source(source, live=live, calls=calls)
    except (benching.ReplayError, JournalError) as error:
        _fail(str(error))
    with _steps() as progress:
        sides = asyncio.run(
            benching.replay(load, texts, servers, rounds=rounds, pace=pace, model=model, progress=progress)
        )
    benching.show(_console(), load, sides)
    if json is not None:
        json.write_bytes(orjson.dumps(benching.as_json(load, sides), option=orjson.OPT_INDENT_2))
    if benching.complaints(sides):
        raise typer.Exit(1)


def top(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="The address of a running router.")
    ] = "http://127.0.0.1:8080",
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    key: Key = None,
) -> None:
    """A live view of a router: what each slot holds, who runs and waits, reuse, losses, rates."""
    from contextlib import suppress

    from .live import LiveError
    from .top import watch

    with suppress(KeyboardInterrupt):
        try:
            watch(_console(), url, key=key, once=once)
        except LiveError as error:
            _fail(str(error))


@journal_app.command()
def scrub(
    journal: JournalFile,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The file to write.", show_default=False)],
) -> None:
    """Write a journal that may be given away: no text, no names of clients, hashes made meaningless."""
    from . import journal_tools

    _convert(journal, target, journal_tools.scrub)


@journal_app.command()
def export(
    journal: JournalFile,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The file to write.", show_default=False)],
    form: Annotated[
        Literal["csv", "trace"],
        typer.Option(
            "--format", help="csv: a row for each request; trace: lines with hashed 512-token blocks."
        ),
    ] = "csv",
) -> None:
    """Write a journal in another form."""
    from . import journal_tools

    _convert(journal, target, lambda a, b, progress: journal_tools.export(a, b, form, progress))


@journal_app.command("import")
def import_(
    log: Annotated[
        Path,
        typer.Argument(metavar="LOG", help="A llama-server's log (text or JSON lines).", show_default=False),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The journal to write.", show_default=False)
    ],
    backend: Annotated[str, typer.Option(help="The backend's name in the journal.")] = "engine",
    start: Annotated[
        str | None,
        typer.Option(
            help="When the engine was started (2026-01-31T12:00); else the file's own time is taken."
        ),
    ] = None,
    guess: Annotated[
        bool,
        typer.Option(help="Guess from lengths which prompts continue conversations that were overwritten."),
    ] = True,
) -> None:
    """Make a journal of an engine's log alone, on a machine that has no router yet."""
    from .journal_tools import import_log

    _refuse_same(log, target)
    try:
        done = import_log(log, target, backend=backend, start=_moment(start, "--start"), guess=guess)
    except OSError as error:
        _fail(f"{error.filename or log}: {error.strerror or error}")
    if not done.requests:
        _fail(f"{log}: no finished request in it (expected the log of a llama-server, level info)")
    typer.echo(
        f"{target}: {done.requests} requests; {done.guessed} of them were taken for the next call of an "
        f"overwritten conversation by their lengths; {done.incomplete} without timings were left out"
    )


def _convert(
    source: Path, target: Path, convert: Callable[[Path, Path, Callable[[int], None]], tuple[int, Reading]]
) -> None:
    from warmslot.router.journal import JournalError

    _refuse_same(source, target)
    with _progress("writing") as progress:
        try:
            count, reading = convert(source, target, progress)
        except (JournalError, OSError) as error:
            _fail(str(error))
    skipped = f"; {reading.skipped} lines were skipped, the first: {reading.why}" if reading.skipped else ""
    typer.echo(f"{target}: {count} requests{skipped}")


def _refuse_same(source: Path, target: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise typer.BadParameter("must not be the file that is read", param_hint="TARGET")


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


def _steps() -> AbstractContextManager[Callable[[str, int, int], None]]:
    """Shows what is being done and how far it is: a bar on a terminal, a line for each step elsewhere."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
    def stepping() -> Iterator[Callable[[str, int, int], None]]:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)
            said = set[str]()

            def tell(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total or None)
                if what not in said:
                    said.add(what)
                    if not console.is_terminal:
                        typer.echo(what, err=True)

            yield tell

    return stepping()


def _counts(text: str, option: str) -> list[int]:
    """Numbers of slots separated by commas; none of an empty text."""
    try:
        counts = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        counts = [0]
    if any(not 1 <= count <= 64 for count in counts):  # noqa: PLR2004  # as many as a forecast knows rates of
        raise typer.BadParameter(f'{text!r}: expected numbers from 1 to 64, as "1,2,4,8"', param_hint=option)
    return counts


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
