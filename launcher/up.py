"""``warmslot up``: backends, router and HTTP server in one process, from the first signal to the last child.

The order at the end: no new requests, running ones may finish (``limits.drain_timeout``), then the server,
then the engines. A second signal leaves all of that out. SIGHUP reads the configuration again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import signal
import socket
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, TextIO

import orjson
import uvicorn
from warmslot.router.app import create_router, server_config
from warmslot.router.journal import JournalError

from .advisor import Advisor
from .attendants import Attendants
from .control import Control, ControlError
from .display import Display, plain_console
from .engine import EngineError, find_engine
from .host_memory import MemoryWatch
from .logfiles import LogFiles
from .model import ModelError, find_model
from .operations import Operations
from .orphans import OwnedError, StateFolder
from .output import standard_output
from .process import State
from .prompt_file import WarmUpError
from .reloading import Parts, Reloader, manners_for, reload_lines
from .state import folder_of, remember
from .supervisor import Launch, Supervisor
from .warm_up import WarmUp, learned_of, prompts_of
from .warmth import Warmth

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from warmslot.router.app import Router
    from warmslot.router.config import Backend, Config

    from .engine import Engine
    from .logs import LogLine
    from .supervisor import BackendStatus

_TAIL = 12
"""Lines of an engine's log that are shown when it cannot be started."""


_CUT_OFF_TIMEOUT = 2.0
"""Seconds for requests that are cut off, and for what the application closes."""


class StartError(Exception):
    """It cannot start; the first line of the message is the reason."""


def run(config: Config, file: Path, *, port: int | None = None, quiet: bool = False) -> int:
    """Serve the configuration read from ``file`` until a signal; the exit code.

    ``port`` replaces ``listen.port``. Raises :class:`StartError`.
    """
    with standard_output(sys.stdout) as output:
        return _run(config, file, output, port=port, quiet=quiet)


def _run(config: Config, file: Path, output: TextIO, *, port: int | None, quiet: bool) -> int:
    _log_to(output)
    display = Display(plain_console(output), quiet=quiet)
    display.say(f"warmslot {version('warmslot')}")
    launches = _launches(config, display)
    with (
        contextlib.closing(
            _bind(config.listen.host, config.listen.port if port is None else port)
        ) as listening,
        _state(config, file) as folder,
        asyncio.Runner(loop_factory=_new_loop) as runner,
    ):
        try:
            return runner.run(_Session(config, file, launches, listening, folder, display).run())
        finally:
            display.close()


@contextlib.contextmanager
def _state(config: Config, file: Path) -> Iterator[StateFolder]:
    """The configuration's state folder, held until the end."""
    folder = StateFolder(folder_of(config, file))
    try:
        folder.acquire()
    except OwnedError as error:
        raise StartError(f"{error} (the setting state.path takes another)") from error
    except OSError as error:
        raise StartError(
            f"the state folder {folder.path} cannot be used: {error.strerror} "
            "(the setting state.path takes another)"
        ) from error
    remember(folder.path, file)
    try:
        yield folder
    finally:
        folder.release()


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - not to be had on Windows

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _log_to(output: TextIO) -> None:
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("warmslot").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").addFilter(_is_meant_to_be_seen)


def _is_meant_to_be_seen(record: logging.LogRecord) -> bool:
    """Not that a request or the application was cancelled: only a stop that cuts them off does that."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, asyncio.CancelledError)


def _launches(config: Config, display: Display) -> list[Launch]:
    """What is to be launched. Models and engines are looked for here, before anything starts."""
    launches = []
    for pool in config.pools:
        for backend in pool.backends:
            if backend.url is not None:
                display.say(f"{backend.name}: runs at {backend.url}")
                continue
            engine, model = _needs(config, backend)
            display.say(
                f"{backend.name}: {engine.describe()}, model {model}, "
                f"{backend.slots} slots of {backend.context} tokens"
            )
            launches.append(Launch(backend, engine))
    return launches


def _needs(config: Config, backend: Backend) -> tuple[Engine, str]:
    try:
        return find_engine(backend.engine or config.engine), find_model(backend.model or "").name
    except (EngineError, ModelError) as error:
        raise StartError(f"{backend.name}: {error}") from error


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"cannot listen on {host}: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        hint = " (listen.port or --port takes another, 0 a free one)" if port else ""
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from error
    return listening


class _Server(uvicorn.Server):
    """Uvicorn, less its signal handlers: the session acts on signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Watchers:
    """The terminal and the log files, told the same."""

    def __init__(self, display: Display, files: LogFiles) -> None:
        self.loading = display.loading
        self.left_out = display.left_out
        self._all = (display, files)

    def state(self, name: str, state: State, reason: str) -> None:
        for watcher in self._all:
            watcher.state(name, state, reason)

    def line(self, name: str, line: LogLine) -> None:
        for watcher in self._all:
            watcher.line(name, line)


class _Session:
    """One run from start to end."""

    def __init__(  # noqa: PLR0917 - one call, above
        self,
        config: Config,
        file: Path,
        launches: Sequence[Launch],
        listening: socket.socket,
        folder: StateFolder,
        display: Display,
    ) -> None:
        self._display = display
        self._listening = listening
        self._warm_up = WarmUp(prompts_of(config), learned_of(config))
        try:
            self._warm_up.check()
        except WarmUpError as error:
            raise StartError(str(error)) from error
        try:
            self._router: Router = create_router(config, observers=[self._warm_up])
        except JournalError as error:
            raise StartError(str(error)) from error
        self._server = _Server(server_config(self._router.app, config))
        self._router.lasting.scales.keep_in(folder.path / "lora-scales.json")
        self._files = LogFiles(folder.path, size=config.state.log_size, files=config.state.log_files)
        self._warmth = Warmth(
            self._router.dispatcher,
            lambda name: self._supervisor.launch(name),  # noqa: PLW0108 - it is made after this
            self._warm_up.cold,
        )
        self._supervisor = Supervisor(
            launches,
            self._warmth,
            _Watchers(display, self._files),
            manners=manners_for(config),
            folder=folder,
            load_at_once=config.load_at_once,
        )
        self._attendants = Attendants(self._supervisor, self._router.dispatcher, self._warmth)
        self._reloader = Reloader(
            config,
            file,
            Parts(self._router, self._supervisor, self._warmth, self._warm_up, self._attendants),
        )
        self._operations = Operations(
            *(file, self._supervisor, self._router.dispatcher, self._reloader),
            address=self._address(),
            advised=self._router.advised,
        )
        self._control = Control(folder.path, self._operations.actions)
        self._reloading: set[asyncio.Task[None]] = set()
        self._launched = bool(launches)
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        await self._control.start()
        try:
            return await self._run()
        finally:  # not where it is killed: then engines may live on, and whoever starts next goes on
            self._router.lasting.scales.keep_no_more()
            self._control.close()
            self._files.close()

    async def _run(self) -> int:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listening]), name="http")
        self._supervisor.start()
        for status in self._supervisor.status():
            self._attendants.attend(status.name)
        watching = [
            asyncio.create_task(MemoryWatch().run(), name="memory"),
            asyncio.create_task(self._warm_up.run(self._address(), self._key), name="warm-up"),
        ]
        if (journal := self._router.journal) is not None:
            advisor = Advisor(self._reloader.config, journal, self._backends, self._router.advise)
            watching.append(asyncio.create_task(advisor.run(), name="advisor"))
        work = asyncio.create_task(self._work(), name="backends")
        asked = asyncio.create_task(self._signals.get(), name="signal")
        await asyncio.wait({serving, work, asked}, return_when=asyncio.FIRST_COMPLETED)
        for task in watching:
            task.cancel()
        self._attendants.close()
        signalled = asked.done()
        if signalled:  # from here on it is meant that backends end
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        ending = asyncio.create_task(self._end(serving, drain=signalled), name="end")
        again = asyncio.create_task(self._signals.get(), name="second signal") if signalled else asked
        await asyncio.wait({ending, again}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await self._end_now(ending, serving)
            return 128 + again.result()
        ending.result()
        if signalled:
            return 0
        serving.result()
        if work.done():
            work.result()  # raises why it could not go on
        raise StartError("the HTTP server ended by itself; its reason is in the log above")

    async def _work(self) -> None:
        """Wait until backends serve, say so, and go on as long as one may serve."""
        statuses = await self._supervisor.wait_settled()
        if not self._has_remote() and all(status.state is State.FAILED for status in statuses):
            raise StartError(_explain(statuses))
        self._announce()
        while True:
            self._supervisor.began.clear()
            await self._supervisor.wait()
            await self._operations.unchanging()
            if not self._supervisor.began.is_set():
                if not self._has_remote():
                    raise StartError(_explain(self._supervisor.status()))
                await self._supervisor.began.wait()

    def _backends(self) -> list[Backend]:
        return [backend for pool in self._reloader.config.pools for backend in pool.backends]

    def _has_remote(self) -> bool:
        return any(backend.url is not None for backend in self._backends())

    def _reload(self) -> None:
        task = asyncio.create_task(self._reloaded(), name="reload")
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    async def _reloaded(self) -> None:
        try:
            came = await self._operations.reload()
        except ControlError as error:
            self._display.say(f"not reloaded: {error}")
            return
        for line in reload_lines(came):
            self._display.say(line)

    async def _end(self, serving: asyncio.Task[None], *, drain: bool) -> None:
        dispatcher, limit = self._router.dispatcher, self._reloader.config.limits.drain_timeout
        self._server.config.timeout_graceful_shutdown = max(1, round(limit))
        if drain:
            if running := len(dispatcher.held()):
                self._display.say(
                    f"stopping: {running} running request(s) may take {limit:g} s; again stops now"
                )
            try:
                async with asyncio.timeout(limit):
                    await dispatcher.drain()
                    await asyncio.gather(*(self._warmth.save(name) for name in self._ready()))
            except TimeoutError:
                self._display.say(f"{len(dispatcher.held())} request(s) did not end in {limit:g} s")
                self._server.force_exit = True
        self._server.should_exit = True
        await asyncio.wait({serving})
        if self._server.force_exit:
            await self._cut_off()
        logging.getLogger("warmslot.router").setLevel(logging.ERROR)  # that backends go down is meant
        await self._supervisor.stop()
        if drain:
            self._display.say("stopped")

    async def _end_now(self, ending: asyncio.Task[None], serving: asyncio.Task[None]) -> None:
        self._display.say("stopping now")
        self._server.force_exit = self._server.should_exit = True
        ending.cancel()
        await asyncio.wait({ending})
        await self._supervisor.kill()
        serving.cancel()
        await asyncio.wait({serving})
        await self._cut_off()

    async def _cut_off(self) -> None:
        """Do what a server that is forced to end leaves out: end its requests, then the application."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CUT_OFF_TIMEOUT):
                if tasks := set(self._server.server_state.tasks):
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                await self._server.lifespan.shutdown()

    def _key(self) -> str | None:
        """A key of our own router, for requests to ourselves."""
        for key in self._reloader.config.keys:
            if key.value is not None and key.use != "admin":
                return key.value.get_secret_value()
        return None

    def _ready(self) -> list[str]:
        return [status.name for status in self._supervisor.status() if status.state is State.READY]

    def _announce(self) -> None:
        self._display.close()
        address = self._address()
        self._display.say(f"\nServing at {address}/v1 (Ctrl-C stops). Try it:\n")
        self._display.say(curl_line(self._reloader.config, address) + "\n")
        if self._reloader.config.ui:
            self._display.say(f"Live page: {address}/ui\n")

    def _address(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl_line(config: Config, address: str) -> str:
    """A command to paste that gets a streamed answer from the default pool."""
    body = {
        "model": config.default_pool.name,
        "stream": True,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Name three uses of a paper clip."}],
    }
    words = ["curl", "-N", f"{address}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", orjson.dumps(body).decode()])
    return f'{line} -H "Authorization: Bearer $KEY"' if config.keys else line


def _explain(statuses: Sequence[BackendStatus]) -> str:
    lines = []
    for status in statuses:
        if status.state is State.FAILED:
            lines.append(f"{status.name}: {status.reason}")
            lines += [f"{status.name} | {line}" for line in status.tail[-_TAIL:]]
    return "\n".join(lines) or "no backend is left"
