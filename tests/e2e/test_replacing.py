"""A backend becomes another one at a reload, by its key; who comes meanwhile waits, within bounds."""

from __future__ import annotations

import asyncio
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import yaml

from tests.support.site import Site, config_of, live, states, streaming
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass
class HeldBack:
    """An engine that starts only when the test says so."""

    path: Path
    fifo: Path

    async def start(self) -> None:
        """Let the one that is being started start."""
        await asyncio.to_thread(lambda: os.close(os.open(self.fifo, os.O_WRONLY)))


@pytest.fixture
def held_back(backend: Callable[..., dict[str, Any]], tmp_path: Path) -> HeldBack:
    script = (tmp_path / backend("any")["engine"]).read_text()
    one = HeldBack(tmp_path / "held-back-engine", tmp_path / "fifo")
    os.mkfifo(one.fifo)
    one.path.write_text(script.replace("\nexec ", f"\ncat {shlex.quote(str(one.fifo))}\nexec "))
    one.path.chmod(0o755)
    return one


async def lets_in(url: str, key: str | None) -> bool:
    """Whether an engine answers somebody with this key."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False, headers=headers) as client:
        status = (await client.get(f"{url}/props")).status_code
    assert status in {200, 401}
    return status == 200


async def begun_to_reload(here: Site, config: dict[str, Any]) -> asyncio.Task[tuple[int, str, str]]:
    """A reload under way."""
    here.file.write_text(yaml.safe_dump(config))
    return asyncio.create_task(here.warmslot("reload"))


async def waiting(here: Site, text: str, held: asyncio.Event) -> str:
    """A stream that is told to wait, which sets ``held``; all that comes of it."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    got = []
    async with here.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line == ":":
                held.set()
            got.append(line)
    assert answer.status_code == 200
    return "\n".join(got)


async def test_a_changed_key_is_that_of_the_engine_and_of_the_router(site: Any, backend: Any) -> None:
    async with site(config_of(backend("one", api_key="old"))) as here:
        assert await here.asked_of("Hello") == "one"
        before = (await here.status())["one"]
        for key, others in (("new", ["old", None]), ("newer", ["new", None]), (None, [])):
            changed = backend("one") if key is None else backend("one", api_key=key)
            assert await here.reload(config_of(changed)) == ["one: added"]
            now = (await here.status())["one"]
            assert now["pid"] != before["pid"]
            assert not psutil.pid_exists(before["pid"])
            assert await lets_in(now["url"], key)
            assert not any([await lets_in(now["url"], other) for other in others])
            assert await here.asked_of(f"Hello with {key}") == "one"
            assert await here.reload(config_of(changed)) == ["nothing to apply"]
            assert (await here.status())["one"]["pid"] == now["pid"]
            before = now


async def test_a_key_that_is_read_from_a_file_is_read_again(site: Any, backend: Any, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("old")
    config = config_of(backend("one", api_key_file=str(file)))
    async with site(config) as here:
        file.write_text("new")
        assert await here.reload(config) == ["one: added"]
        url = (await here.status())["one"]["url"]
        assert [await lets_in(url, key) for key in ("old", "new")] == [False, True]
        assert await here.asked_of("Hello") == "one"


async def test_no_request_is_lost_while_a_backend_is_replaced(
    site: Any, backend: Any, held_back: HeldBack
) -> None:
    limits = {"ping_interval": 0.05}
    new = backend("one", api_key="new", engine=str(held_back.path))
    async with site(config_of(backend("one", api_key="old"), limits=limits)) as here:
        async with streaming(here, "one"):  # to its end, by the old one
            reloading = await begun_to_reload(here, config_of(new, limits=limits))
            await live(here, lambda shown: states(shown) == ["draining"])
            early = [asyncio.create_task(here.asked_of(f"Early {number}")) for number in range(4)]
            await live(here, lambda shown: shown["pools"][0]["waiting"] == 4)
        await live(here, lambda shown: states(shown) == ["down"])
        held = [asyncio.Event() for _ in range(4)]
        late = [asyncio.create_task(waiting(here, f"Late {n}", one)) for n, one in enumerate(held)]
        await asyncio.gather(*(one.wait() for one in held))
        assert not any(task.done() for task in (*early, *late, reloading))
        await held_back.start()
        assert await asyncio.gather(*early) == ["one"] * 4
        assert all("data: [DONE]" in text for text in await asyncio.gather(*late))
        assert await reloading == (0, "one: added\n", "")
        assert await lets_in((await here.status())["one"]["url"], "new")


async def test_who_waits_for_a_backend_that_is_replaced_waits_no_longer_than_is_set(
    site: Any, backend: Any, held_back: HeldBack
) -> None:
    limits = {"hold_timeout": 0.2}
    new = backend("one", api_key="new", engine=str(held_back.path))
    async with site(config_of(backend("one", api_key="old"), limits=limits)) as here:
        async with streaming(here, "one"):
            reloading = await begun_to_reload(here, config_of(new, limits=limits))
            await live(here, lambda shown: states(shown) == ["draining"])
            early = asyncio.create_task(here.ask("Early"))
            await live(here, lambda shown: shown["pools"][0]["waiting"] == 1)
        for answer in (await early, await here.ask("Late")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert "retry-after" in answer.headers
        assert not reloading.done()
        await held_back.start()
        assert await reloading == (0, "one: added\n", "")
        assert await here.asked_of("At last") == "one"
