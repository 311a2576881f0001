"""A child that tests of the launcher control: as much of llama-server as the launcher sees.

``--mode`` says how it behaves:

serve         loads, serves until SIGTERM, then ends with status 0
stubborn      serves and ignores SIGTERM
dies          serves; ends with status 3 at the first GET /die
never         binds its port and answers 503 for ever
silent        does nothing at all, ignores SIGTERM
exits         ends at once with status 7
refuses       logs errors as llama-server does for a broken model and ends with status 1
garbage       prints bytes that are no text and a line of 5 MB without an end, then serves
flood         prints 20,000 lines, then serves
wrapper       starts another stub in mode serve and waits for it, as a shell script would
deaf-wrapper  starts another stub in mode stubborn and ends at once on SIGTERM
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def option(name: str, default: str = "") -> str:
    """The value of an option on the command line."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def log(level: str, message: str) -> None:
    """One line as llama-server logs it."""
    sys.stderr.write(f"0.00.001.000 {level} {message}\n")
    sys.stderr.flush()


class Handler(BaseHTTPRequestHandler):
    """The routes that the launcher uses."""

    def do_GET(self) -> None:
        """Answer."""
        if self.path == "/die":
            os._exit(3)
        loading = option("--mode") == "never"
        slots, total = int(option("-np")), int(option("-c"))
        props = {"total_slots": slots, "default_generation_settings": {"n_ctx": total // slots}}
        body = json.dumps({} if self.path != "/props" else props).encode()
        self.send_response(503 if loading else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def serve(*, announce: bool = True) -> None:
    """Listen and answer until killed."""
    try:
        server = ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler)
    except OSError:
        log(
            "E",
            f"srv         start: couldn't bind HTTP server socket, port: {option('--port')}",
        )
        log("E", "srv  llama_server: exiting due to HTTP server error")
        sys.exit(1)
    log("I", "srv    load_model: loading model 'model.gguf'")
    if announce:
        log("I", "srv  llama_server: model loaded")
        log("I", f"srv  llama_server: listening on http://127.0.0.1:{server.server_port}")
    server.serve_forever()


def main() -> None:
    """Behave as ``--mode`` says."""
    mode = option("--mode")
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN if mode in {"stubborn", "silent"} else lambda *_: os._exit(0)
    )
    if mode == "exits":
        sys.exit(7)
    elif mode == "refuses":
        log("E", "gguf_init_from_reader: failed to read key-value pairs")
        log("E", "srv  llama_server: exiting due to model loading error")
        sys.exit(1)
    elif mode == "silent":
        signal.pause()
    elif mode.endswith("wrapper"):
        arguments = [
            word.replace(mode, "stubborn" if mode.startswith("deaf") else "serve") for word in sys.argv
        ]
        sys.exit(subprocess.run([sys.executable, "-S", "-P", *arguments], check=False).returncode)
    elif mode == "garbage":
        sys.stdout.buffer.write(b'\xff\xfe\x00\x80{\n{"type": 5}\n[\n' + b"x" * 5_000_000)
        sys.stdout.buffer.flush()
    elif mode == "flood":
        for number in range(20_000):
            log("I", f"line {number}")
    serve(announce=mode != "never")


if __name__ == "__main__":
    main()
