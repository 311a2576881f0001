"""The commands for whoever runs warmslot: status, logs, restart, set, reload.

They speak to a running ``warmslot up`` through the socket in its state folder; ``logs`` reads files there.
Imports stand inside the commands, so that each starts fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration file of the one that is meant; needed where several run.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The backend.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(status)
    app.command()(logs)
    app.command()(restart)
    app.command("set")(change)
    app.command("reload")(reload_config)


def status(config: Config = None, as_json: AsJson = False) -> None:
    """Show the backends of a running warmslot: state, slots, what they hold, memory."""
    came = _ask(_folder(config), "status")
    if as_json:
        _print_json(came)
        return
    from .status_table import show

    show(came)


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to begin with.")] = 100,
    config: Config = None,
) -> None:
    """Print an engine's log, also of one that runs no more."""
    from . import logfiles

    path = logfiles.file_of(_folder(config, running=False), name)
    try:
        for line in logfiles.follow(path, lines) if follow else logfiles.last_lines(path, lines):
            typer.echo(line, nl=False)
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.log"))) or "none"
        _fail(f"no log of {name!r}: {path}: {error.strerror} (there are logs of: {known})")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def restart(name: Name, config: Config = None) -> None:
    """Let what runs on a backend end, and start it anew; also one that has failed."""
    _report(_ask(_folder(config), "restart", name=name))


def change(
    name: Name,
    slots: Annotated[int | None, typer.Option(help="Slots, each with its own context.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens that one slot can hold.")] = None,
    config: Config = None,
) -> None:
    """Give a running backend other slots or another context, without losing a request.

    It holds until the next start or reload; the configuration file is left alone.
    """
    if slots is None and context is None:
        _fail("found no change, allowed: --slots, --context", 2)
    came = _ask(_folder(config), "set", name=name, slots=slots, context=context)
    _report(came)


def reload_config(config: Config = None) -> None:
    """Apply a changed configuration file to the warmslot that runs it (as SIGHUP does)."""
    from .reloading import reload_lines

    came = _ask(_folder(config), "reload")
    for line in reload_lines(came):
        typer.echo(line)
    if came["failed"] or came["kept"]:
        raise typer.Exit(1)


def _report(came: dict[str, Any]) -> None:
    unchanged = ", as before" if came.get("unchanged") else ""
    typer.echo(
        f"{came['name']}: {came['state']}, {came['slots']} slots of {came['context']} tokens{unchanged}"
    )


def _folder(config: Path | None, *, running: bool = True) -> Path:
    """The state folder that is meant: of the file given, or of the only warmslot there is."""
    from .control import is_running, running_folders
    from .state import configuration_of, folder_of, known_folders, remembered

    if config is not None:
        # By what the run has noted first: the file may be broken, changed or gone since.
        noted = remembered(config)
        if noted and (not running or is_running(noted[0])):
            return noted[0]
        from warmslot.router.config_file import ConfigError, load

        try:
            return folder_of(load(config), config)
        except ConfigError as error:
            _fail(str(error), 2)
    folders = running_folders()
    if not folders and not running:
        folders = known_folders()
    if len(folders) != 1:
        found = "no warmslot runs here, or its state is elsewhere"
        if folders:
            found = "several run here" if running else "there are logs of several"
        names = "".join(f"\n  {configuration_of(folder) or folder}" for folder in folders)
        _fail(f"{found}: name its configuration file with --config{names}")
    return folders[0]


def _ask(folder: Path, do: str, **fields: Any) -> Any:
    from .control import ControlError, NotRunningError, ask

    try:
        return ask(folder, do, **fields)
    except (ControlError, NotRunningError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print_json(value: object) -> None:
    import orjson

    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)
