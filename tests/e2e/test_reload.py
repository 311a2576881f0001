"""A configuration that is read again by a running ``warmslot up``, with fake engines as its processes."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import yaml

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import sample
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from tests.support.up import Running

    StartUp = Callable[..., Awaitable[Running]]
    Command = Callable[..., Awaitable[tuple[int, str, str]]]

HELP = """\
-m,    --model FNAME
-np,   --parallel N
-c,    --ctx-size N
-t,    --threads N
--host HOST
--port PORT
--no-kv-unified
--no-cache-idle-slots
--cache-ram N
--slots
--metrics
--log-jsonl
--slot-save-path PATH
"""

ROOT = Path(__file__).parents[2]


class Site:
    """A running warmslot, its file, and its clients."""

    def __init__(self, running: Running, warmslot: Command, file: Path, http: httpx.AsyncClient) -> None:
        self.running = running
        self.warmslot = warmslot
        self.file = file
        self.http = http

    async def reload(self, config: dict[str, Any]) -> list[str]:
        """Write the file and have it read; what the command says."""
        code, out, err = await self.try_reload(config)
        assert (code, err) == (0, "")
        return out.splitlines()

    async def try_reload(self, config: dict[str, Any]) -> tuple[int, str, str]:
        """The same, and it may be refused."""
        self.file.write_text(yaml.safe_dump(config))
        return await self.warmslot("reload")

    async def status(self) -> dict[str, dict[str, Any]]:
        """The backends by name."""
        shown = json.loads((await self.warmslot("status", "--json"))[1])
        return {backend["name"]: backend for backend in shown["backends"]}

    async def operate(self, name: str, **command: Any) -> None:
        """Use a fake engine's remote control."""
        url = (await self.status())[name]["url"]
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            assert (await client.post(f"{url}/fake", json=command)).status_code == 200

    async def ask(self, text: str = "Hello", model: str = "m", **headers: str) -> httpx.Response:
        """A chat."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def asked_of(self, text: str, model: str = "m") -> str:
        """A chat that is served; by which backend."""
        answer = await self.ask(text, model)
        assert answer.status_code == 200, answer.text
        return answer.headers["X-Warmslot-Backend"]


@pytest.fixture
def backend(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes the settings of a backend whose engine is a fake."""
    engine, model = tmp_path / "fake-engine", tmp_path / "model.gguf"
    command = shlex.join([sys.executable, "-m", "tests.fakes"])
    engine.write_text(
        f"#!/bin/sh\ncd {shlex.quote(str(ROOT))}\n"
        f'[ "$1" = --help ] && cat <<\'EOF\' && exit\n{HELP}EOF\nexec {command} "$@"\n'
    )
    engine.chmod(0o755)
    model.write_bytes(b"GGUF and nothing else")

    def make(name: str, **settings: Any) -> dict[str, Any]:
        own = {"model": str(model), "engine": str(engine), "slots": 1, "context": 1024}
        return {"name": name, **own, **settings}

    return make


def config_of(*backends: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One pool."""
    pool = {"name": "m", "backends": list(backends), **more.pop("pool", {})}
    return {"pools": [pool], **more}


@pytest.fixture
def site(up: StartUp, warmslot: Command, tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    """Starts one on a configuration; at its end no process is left."""

    @asynccontextmanager
    async def start(config: dict[str, Any]) -> AsyncIterator[Site]:
        running = await up(yaml.safe_dump(config))
        children = running.children
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as http:
            yield Site(running, warmslot, tmp_path / "up.yaml", http)
        children += running.children
        running.process.send_signal(signal.SIGTERM)
        assert await running.end() == (0, "")
        assert psutil.wait_procs(children, timeout=0)[1] == []

    return start


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def test_a_wrong_file_changes_nothing_and_says_all_that_is_wrong(site: Any, backend: Any) -> None:
    async with site(config_of(backend("one"))) as here:
        pids = [child.pid for child in here.running.children]
        for config, said in (
            (config_of(backend("one", slots="many")), ["slots: found"]),
            (config_of(backend("one", slots=3), backend("one")), ["a second time"]),
            (
                config_of(
                    backend("one", slots=3, model="/no/model.gguf"),
                    backend("two", engine="/no/engine", args=["--port", "1"]),
                    keys=[{"name": "a", "value": "secret"}],
                    pool={"warm_up": ["/no/prompt.json"]},
                ),
                ["/no/model.gguf", "/no/engine", "/no/prompt.json"],
            ),
            (config_of(backend("one"), backend("two", args=["--port", "1"])), ["--port clashes with"]),
        ):
            code, out, err = await here.try_reload(config)
            assert (code, out) == (1, "")
            assert all(word in err for word in said), err
        assert [child.pid for child in here.running.children] == pids
        assert list(await here.status()) == ["one"]
        assert (await here.ask()).status_code == 200


async def test_a_backend_is_added_and_another_goes_when_it_has_served_all(site: Any, backend: Any) -> None:
    async with site(config_of(backend("one"))) as here:
        async with streaming(here, "one"):
            assert await here.reload(config_of(backend("one"), backend("two"))) == ["two: added"]
            assert await here.asked_of("Another one") == "two"
            before = await here.status()
            here.file.write_text(yaml.safe_dump(config_of(backend("two"))))
            reloading = asyncio.create_task(here.warmslot("reload"))
            await live(here, lambda shown: shown["backends"][0]["state"] == "draining")
            assert await here.asked_of("Another one, too") == "two"
            assert not reloading.done()
        assert await reloading == (0, "one: removed\n", "")
        assert list(await here.status()) == ["two"]
        assert not psutil.pid_exists(before["one"]["pid"])
        text = (await here.http.get("/metrics")).text
        assert sample(text, "warmslot_backend_up", backend="two") == 1
        assert 'backend_up{backend="one"}' not in text
        assert sample(text, "warmslot_requests_total", backend="one", outcome="ok") == 1
        await live(here, lambda shown: [one["name"] for one in shown["backends"]] == ["two"])


async def live(here: Site, is_meant: Callable[[dict[str, Any]], bool], **headers: str) -> dict[str, Any]:
    """What the live page shows, once it is what is meant."""
    async with here.http.stream("GET", "/ui/events", headers=headers) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and is_meant(shown := json.loads(line.removeprefix("data: "))):
                return shown  # type: ignore[no-any-return]
    raise AssertionError("it never showed that")


@asynccontextmanager
async def streaming(here: Site, name: str, **headers: str) -> AsyncIterator[None]:
    """A stream that runs on the first backend in the block, and of which all has come after it."""
    await here.operate(name, op="hold", gate="token")
    body = {"messages": [{"role": "user", "content": "A long story"}], "max_tokens": 4, "stream": True}
    async with here.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        await live(
            here, lambda shown: any(slot["running"] for slot in shown["backends"][0]["slots"]), **headers
        )
        yield
        await here.operate(name, op="release", gate="token")
        lines = [line async for line in answer.aiter_lines()]
    assert answer.status_code == 200
    assert "data: [DONE]" in lines
    assert sum('"content"' in line for line in lines) >= 4


async def test_keys_limits_and_names_change_in_one_step(site: Any, backend: Any) -> None:
    def keyed(secret: str, **more: Any) -> dict[str, Any]:
        return config_of(backend("one"), keys=[{"name": "a", "value": secret}], **more)

    async with site(keyed("old")) as here:
        old, new = {"Authorization": "Bearer old"}, {"Authorization": "Bearer new"}
        async with streaming(here, "one", **old):
            lines = await here.reload(
                keyed("new", limits={"max_body": 2048}, pool={"aliases": ["n"], "masks": ["now: .*"]})
            )
            assert lines == ["in force: keys, limits.max_body, pools.m.aliases, pools.m.masks"]
        assert (await here.ask(**old)).status_code == 401
        assert (await here.ask(model="n", **new)).status_code == 200
        assert (await here.ask("x" * 3000, **new)).status_code == 413
        counted = []
        for clock in ("12:00", "13:00"):
            assert (await here.ask(f"now: {clock}\n" + "Mark this. " * 40, **new)).status_code == 200
            text = (await here.http.get("/metrics", headers=new)).text
            counted.append(sample(text, "warmslot_predicted_reuse_tokens_total"))
        assert counted[1] - counted[0] > 40  # the line that differs is left out


async def test_what_would_open_it_to_all_is_refused(site: Any, backend: Any) -> None:
    listen = {"host": "0.0.0.0"}  # noqa: S104 - that is the case
    keys = [{"name": "a", "value": "secret"}]
    async with site(config_of(backend("one"), listen=listen, keys=keys)) as here:
        here.http.base_url = httpx.URL(str(here.http.base_url).replace("0.0.0.0", "127.0.0.1"))  # noqa: S104
        code, _, err = await here.try_reload(config_of(backend("one")))
        assert code == 1
        assert "read only at a start" in err
        assert "without keys" in err
        assert (await here.ask()).status_code == 401


async def test_settings_that_the_engine_does_not_know_of_need_no_restart(site: Any, backend: Any) -> None:
    async with site(config_of(backend("one"))) as here:
        pid = (await here.status())["one"]["pid"]
        eased = backend("one", start_timeout="9s", progress_timeout=0)
        assert await here.reload(config_of(eased)) == ["one: has its new settings, without a restart"]
        assert await here.reload(config_of(eased)) == ["nothing to apply"]
        assert (await here.status())["one"]["pid"] == pid
        other = backend("one", start_timeout="9s", progress_timeout=0, slots=2)
        assert await here.reload(config_of(other)) == ["one: runs with its new settings"]
        assert (await here.status())["one"]["pid"] != pid


async def test_pools_come_and_go(site: Any, backend: Any) -> None:
    async with site(config_of(backend("one"))) as here:
        two = config_of(backend("one"))
        two["pools"].append({"name": "other", "backends": [backend("two")]})
        assert await here.reload(two) == ["two: added"]
        assert await here.asked_of("Hi", "other") == "two"
        moved = config_of(backend("two"))
        moved["pools"].append({"name": "other", "backends": [backend("one")]})
        assert await here.reload(moved) == ["one: added", "two: added"]
        assert await here.asked_of("Hi", "other") == "one"
        assert await here.reload(config_of(backend("two"))) == ["one: removed"]
        answer = await here.ask("Hi", "other")
        assert answer.status_code == 404
        listed = (await here.http.get("/v1/models")).json()["data"]
        assert [pool["id"] for pool in listed] == ["m"]
        assert 'queue_requests{pool="other"}' not in (await here.http.get("/metrics")).text


async def test_what_waits_in_a_pool_is_served_before_the_pool_goes(site: Any, backend: Any) -> None:
    two = config_of(backend("one"))
    two["pools"].append({"name": "other", "backends": [backend("two")]})
    async with site(two) as here:
        await here.operate("two", op="hold", gate="token")
        asked = [asyncio.create_task(here.asked_of(text, "other")) for text in ("The first", "The second")]
        await live(here, lambda shown: shown["pools"][1]["waiting"] == 1)
        here.file.write_text(yaml.safe_dump(config_of(backend("one"))))
        reloading = asyncio.create_task(here.warmslot("reload"))
        while len((await here.http.get("/v1/models")).json()["data"]) == 2:  # till the reload has begun
            pass
        assert (await here.ask("Too late", "other")).status_code == 404
        assert not reloading.done()
        await here.operate("two", op="release", gate="token")
        assert await asyncio.gather(*asked) == ["two", "two"]
        assert await reloading == (0, "two: removed\n", "")


async def test_the_last_that_serves_is_kept_until_another_does(
    site: Any, backend: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "broken-engine"
    said = "0.00.000.000 E srv    load_model: failed to load model, 'it'"
    broken.write_text(
        (tmp_path / "fake-engine").read_text().replace("exec", f"echo {shlex.quote(said)} >&2; exit 1 #")
    )
    broken.chmod(0o755)
    async with site(config_of(backend("one"))) as here:
        code, out, _ = await here.try_reload(config_of(backend("two", engine=str(broken))))
        kept, failed = out.splitlines()
        assert code == 1
        assert kept.startswith("one: gone from the file, but kept: nothing else of its pool serves")
        assert failed.startswith("two: ")
        assert await here.asked_of("Hi") == "one"
        assert await here.reload(config_of(backend("two"))) == [
            "two: runs with its new settings",
            "one: removed",
        ]
        assert await here.asked_of("Hi") == "two"


async def test_a_backend_elsewhere_that_cannot_be_reached_is_said_with_the_reason(
    site: Any, backend: Any, unused_address: str
) -> None:
    why = f"no connection to {unused_address}: Connection refused"
    async with site(config_of(backend("one"))) as here:
        code, out, _ = await here.try_reload(
            config_of(backend("one"), {"name": "far", "url": unused_address})
        )
        assert (code, out) == (1, f"far: added, but down: {why} (it is asked again and again)\n")
        far = (await here.status())["far"]
        assert (far["state"], far["reason"]) == ("remote, down", why)
        assert f"far: {why}" in (await here.warmslot("status"))[1]


async def test_backends_elsewhere_come_go_and_move(site: Any, backend: Any) -> None:
    async with FakeLlamaServer() as first, FakeLlamaServer(api_key="inner") as second:
        remote = {"name": "far", "url": first.base_url}
        async with site(config_of(backend("one"))) as here:
            assert await here.reload(config_of(remote)) == ["far: added", "one: removed"]
            assert await here.asked_of("Hi") == "far"
            assert len(first.generations()) == 1
            moved = {"name": "far", "url": second.base_url, "api_key": "inner"}
            assert await here.reload(config_of(moved)) == ["far: added"]
            assert await here.asked_of("Hi") == "far"
            assert len(second.generations()) == 1
            assert await here.reload(config_of(backend("far"))) == ["far: added"]
            assert await here.asked_of("Hi") == "far"
            assert (await here.status())["far"]["state"] == "ready"


async def test_lora_scales_outlast_an_engine_and_whoever_refuses_them_gets_nothing(
    site: Any, backend: Any
) -> None:
    async def scale(name: str) -> float:
        url = (await here.status())[name]["url"]
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            return float((await client.get(f"{url}/lora-adapters")).json()[0]["scale"])

    one, two = (backend(name, args=["--lora", "a.gguf"]) for name in ("one", "two"))
    async with site(config_of(one)) as here:
        assert await scale("one") == 1
        answer = await here.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
        assert answer.status_code == 200
        assert (await here.warmslot("restart", "one"))[0] == 0
        assert await scale("one") == 0.5
        assert await here.reload(config_of(one, two)) == ["two: added"]
        assert await scale("two") == 0.5
        why = (
            "LoRA scales that were set over HTTP are not in force on it: "
            "it refused them (status 400: invalid adapter id)"
        )
        code, out, _ = await here.try_reload(config_of(one, backend("two")))
        assert (code, out) == (1, f"two: runs, but gets no requests: {why}\n")
        shown = (await here.status())["two"]
        assert (shown["state"], shown["reason"]) == ("ready, withheld", why)
        assert {await here.asked_of(f"Hi {number}") for number in range(4)} == {"one"}
        code, _, err = await here.warmslot("restart", "two")
        assert (code, why in err) == (1, True)
        # Those of its flags are all that are left once the other one has no such adapter either.
        assert await here.reload(config_of(backend("one"), backend("two"))) == [
            "one: runs with its new settings"
        ]
        assert [one["state"] for one in (await here.status()).values()] == ["ready", "ready"]


async def test_what_only_a_start_reads_is_named_each_time(site: Any, backend: Any) -> None:
    async with site(config_of(backend("one"))) as here:
        more = {
            "ui": False,
            "load_at_once": 1,
            "listen": {"port": 1},
            "limits": {"header_timeout": 7},
            "journal": {"files": 3},
            "advice": {"every": 60},
            "state": {"log_files": 2},
            "endpoint": {"isolation": True},
        }
        said = [
            *("listen.port", "journal.files", "advice.every", "state.log_files", "ui", "load_at_once"),
            *("limits.header_timeout", "endpoint.isolation"),
        ]
        for _ in range(2):
            lines = await here.reload(config_of(backend("one"), **more))
            assert lines == [f"changed, but read only at a start: {', '.join(said)}"]
