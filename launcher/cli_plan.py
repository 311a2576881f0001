"""The commands that look at a model and at an engine before anything runs: plan, engine.

Imports stand inside the commands, so that each starts fast.
"""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
EngineName = Annotated[
    str | None,
    typer.Option(help="Path of a llama-server, or embedded; searched for when left out.", show_default=False),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(plan)
    app.command()(engine)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or demo.", show_default=False)],
    memory: Annotated[
        str | None,
        typer.Option(
            help='Memory to fill, as "24GiB"; that of the first GPU, or of the host, when left out.'
        ),
    ] = None,
    try_it: Annotated[bool, typer.Option("--try/--no-try", help="Start the engine with the result.")] = True,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Say how many slots of which context fit into memory, and what to set."""
    import asyncio

    import psutil
    from pydantic import TypeAdapter, ValidationError
    from warmslot.router.config import Bytes

    from .cli_insight import _print_json
    from .engine import EngineError, find_engine
    from .host_memory import devices
    from .memory import PlanError, read_model
    from .model import ModelError, find_model
    from .plan import advise, table
    from .plan_report import as_json as to_json
    from .plan_report import show

    try:
        path = find_model(model)
        facts = read_model(path)
        found = find_engine(engine) if try_it else None
    except (ModelError, PlanError, EngineError) as error:
        _fail(str(error))
    available = psutil.virtual_memory().available
    gpus = asyncio.run(devices())
    if memory is not None:
        try:
            size, where = TypeAdapter(Bytes).validate_python(memory), "as given"
        except ValidationError:
            _fail(f'--memory: found "{memory}", allowed: bytes, or a size such as "24GiB"', 2)
    elif gpus:
        size, where = gpus[0].total - gpus[0].used, f"free on GPU {gpus[0].index}"
    else:
        size, where = available, "available on the host"
    advice = asyncio.run(advise(facts, path, size, available, found))
    types = ("f16", "f16") if advice is None else advice.types
    rows = table(facts, size, types)
    if as_json:
        _print_json(to_json(facts, rows, size, advice))
    else:
        show(facts, rows, size, where, advice)


def engine(engine: EngineName = None, as_json: AsJson = False) -> None:
    """Show the engine that is found: its program, its devices, and which flags of warmslot it takes."""
    from .cli_insight import _print_json
    from .engine import EngineError, find_engine
    from .engine_report import report, text

    try:
        found = find_engine(engine)
    except EngineError as error:
        _fail(str(error))
    facts = report(found)
    if as_json:
        _print_json(facts)
    else:
        typer.echo(text(facts))


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)
