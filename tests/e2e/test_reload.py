"""A configuration that is read again by a running ``warmslot up``, with fake engines as its processes."""

from __future__ import annotations

import asyncio
import shlex
import signal
import socket
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import yaml

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import sample
from tests.support.site import config_of, live, streaming
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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


async def test_lora_scales_outlast_a_warmslot_that_is_killed_and_not_one_that_is_stopped(
    up: Any, backend: Any
) -> None:
    text = yaml.safe_dump(config_of(backend("one", args=["--lora", "a.gguf"])))
    found = []
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
        running = await up(text)
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
            found.append((await client.get("/lora-adapters")).json()[0]["scale"])
            if end is signal.SIGKILL:
                answer = await client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
                assert answer.status_code == 200
        running.process.send_signal(end)
        await running.end()
    assert found == [1.0, 0.5, 1.0]


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
