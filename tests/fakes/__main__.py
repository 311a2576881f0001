"""The fake as a command that takes llama-server's flags; ``POST /fake`` is its remote control.

Bodies of ``POST /fake``: ``{"op": "loaded"}``, ``{"op": "hold"|"release", "gate": "prefill"|"token"|…}``,
``{"op": "set", "name": …, "value": …}`` for any public knob, ``{"op": "report"}``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fakes.generation import body_of, to_json
from tests.fakes.llama_server import FakeLlamaServer

if TYPE_CHECKING:
    from tests.fakes.http import Connection, Received

_FLAGS = (
    "--metrics",
    "--no-kv-unified",
    "--no-cache-idle-slots",
    "--log-jsonl",
    "--no-webui",
    "--no-ui",
    "--jinja",
)
_VALUES = ("--cache-ram", "--slot-save-path", "--api-key", "-b", "-ub", "-ngl", "-fa", "--log-file", "-lv")


class CommandServer(FakeLlamaServer):
    """The fake with its remote control."""

    async def _handle(self, connection: Connection, request: Received) -> None:
        if request.path != "/fake":
            await super()._handle(connection, request)
            return
        connection.answer(200, to_json(self._operate(body_of(request))))

    def _operate(self, body: dict[str, Any]) -> dict[str, Any]:
        match body.get("op"):
            case "loaded":
                self.loaded()
            case "hold":
                getattr(self, body["gate"]).hold()
            case "release":
                getattr(self, body["gate"]).release(body.get("count"))
            case "set":
                setattr(self, body["name"], body["value"])
        return {
            "requests": len(self.requests),
            "generations": [[one.path, one.slots, one.outcome] for one in self.generations()],
            "violations": self.violations,
            "busy": self.busy,
            "deferred": self.deferred,
        }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fake-llama-server", allow_abbrev=False)
    parser.add_argument("--model", "-m", required=True)
    parser.add_argument("--alias", "-a")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-np", "--parallel", type=int, default=4)
    parser.add_argument("-c", "--ctx-size", type=int, default=8192)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--slots", action="store_true", default=True)
    parser.add_argument("--no-slots", dest="slots", action="store_false")
    parser.add_argument("--version", action="version", version="version: 0 (fake)")
    parser.add_argument("--lora", action="append", default=[], help="an adapter, wholly on")
    parser.add_argument("--fake-loading", action="store_true", help="load until POST /fake says loaded")
    for flag in _FLAGS:
        parser.add_argument(flag, action="store_true")
    for value in _VALUES:
        parser.add_argument(value)
    return parser.parse_args()


def _log(line: str) -> None:
    print(f"0.00.000.000 I {line}", file=sys.stderr, flush=True)  # noqa: T201 - a command's output


async def _serve(arguments: argparse.Namespace) -> None:
    server = CommandServer(
        slots=arguments.parallel,
        context=arguments.ctx_size // arguments.parallel,
        loading=arguments.fake_loading,
        alias=arguments.alias or arguments.model,
        api_key=os.environ.get("LLAMA_API_KEY") or arguments.api_key,
        log=_log,
    )
    server.adapters = [{"id": n, "path": path, "scale": 1.0} for n, path in enumerate(arguments.lora)]
    if not arguments.slots:
        server.missing.add("slots")
    if not arguments.metrics:
        server.missing.add("metrics")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await server.start(arguments.host, arguments.port)
    _log(f"srv  llama_server: listening on http://{arguments.host}:{server.port}")
    if not server.loading:
        _log("srv  llama_server: model loaded")
    await stop.wait()
    _log("srv    operator(): cleaning up before exit...")
    await server.crash()


def main() -> int:
    """Run until a signal; 1 where the model cannot be read, as the engine has it."""
    arguments = _arguments()
    _log(f"srv    load_model: loading model '{arguments.model}'")
    if not Path(arguments.model).is_file():
        _log(f"srv    load_model: failed to load model, '{arguments.model}'")
        _log("srv  llama_server: exiting due to model loading error")
        return 1
    asyncio.run(_serve(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
