"""The command line ``warmslot``: one command over everything. What a command does stands in other modules.

Imports stand inside the commands, so that each starts fast. Exit codes: 0 done, 1 failed, 2 wrong usage or
wrong configuration.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from . import cli_insight, cli_ops, cli_plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmslot.router.config import Config

LAZY = {"simulate": ("simulate", "simulate")}
"""Commands that are whole functions of other modules: name -> module of this package, function."""


class _Group(TyperGroup):
    """The top level; it imports the commands of :data:`LAZY` only when one is asked for, or all listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *LAZY]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LAZY and cmd_name not in self.commands:
            module, function = LAZY[cmd_name]
            single = typer.Typer(add_completion=False)
            single.command(cmd_name)(getattr(import_module(f".{module}", __package__), function))
            self.commands[cmd_name] = typer.main.get_command(single)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="warmslot",
    cls=_Group,
    help="Starts llama-server backends and routes to the slot that already holds most of a prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Looks at a configuration file.", no_args_is_help=True)
bench_app = typer.Typer(help="Measures on this machine.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
cli_insight.add_to(app)
bench_app.command("replay")(cli_insight.bench_replay)
cli_ops.add_to(app)
cli_plan.add_to(app)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The configuration file (YAML).", show_default=False)
]


def main() -> None:
    """Entry point of the console script."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"warmslot {version('warmslot')}")
        raise typer.Exit


@app.callback()
def _options(
    _version_option: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    file: ConfigFile,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Listen here instead of listen.port; 0 takes a free port."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Of the engines' logs show errors only.")] = False,
) -> None:
    """Start the backends of a configuration file and serve them until Ctrl-C."""
    from .up import StartError, run

    config = _load(file)
    try:
        code = run(config, file, port=port, quiet=quiet)
    except StartError as error:
        _fail(str(error).splitlines(), 1)
    raise typer.Exit(code)


@config_app.command("check")
def config_check(
    file: ConfigFile,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere", help="It is for another machine: leave out whether what it names is on this one."
        ),
    ] = False,
) -> None:
    """Say what is wrong with a configuration file, and what it names that is not here, one line for each.

    Models, engines and their flags, folders and files to write to are looked at. Exit code 2: the file is
    wrong, 1: something is missing on this machine.
    """
    config = _load(file)
    if not elsewhere:
        from warmslot.router.config_file import ConfigError, locate

        from .preflight import preflight

        if lacks := preflight(config):
            try:
                at = locate(file)
            except ConfigError as error:  # changed since it was read
                _fail(error.lines, 2)
            _fail((at(lack.place, lack.message) for lack in lacks), 1)
    backends = [backend for pool in config.pools for backend in pool.backends]
    launched = sum(backend.url is None for backend in backends)
    typer.echo(
        f"{file}: good: {len(config.pools)} pool(s), {launched} backend(s) launched here, "
        f"{len(backends) - launched} remote, {len(config.keys)} key(s)"
    )


@config_app.command("show")
def config_show(file: ConfigFile) -> None:
    """Print a configuration with all defaults filled in; secrets are not shown."""
    from warmslot.router.config_file import dump

    typer.echo(dump(_load(file)), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the configuration file, for editors."""
    from warmslot.router.config_schema import schema_text

    typer.echo(schema_text(), nl=False)


@bench_app.command("demo")
def bench_demo(
    agents: Annotated[int, typer.Option(min=1, max=64, help="Agents that are alive at once.")] = 6,
    slots: Annotated[int, typer.Option(min=1, max=64, help="Slots that the router keeps warm.")] = 4,
    turns: Annotated[int, typer.Option(min=1, max=12, help="Requests of each agent.")] = 5,
    engine: Annotated[
        str | None, typer.Option(help="Path of a llama-server, or embedded; searched for when left out.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the figures and every request here.")
    ] = None,
) -> None:
    """Replay a small agent workload on the engine by itself and through the router, side by side."""
    from .bench import BenchError
    from .bench import bench_demo as measure

    try:
        code = measure(agents=agents, slots=slots, turns=turns, engine=engine, json=json)
    except BenchError as error:
        _fail([str(error)], 1)
    raise typer.Exit(code)


def _load(file: Path) -> Config:
    from warmslot.router.config_file import ConfigError, load

    try:
        return load(file)
    except ConfigError as error:
        _fail(error.lines, 2)


def _fail(lines: Iterable[str], code: int) -> NoReturn:
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(code)
