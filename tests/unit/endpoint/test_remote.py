"""Backends that run elsewhere behind TLS and a key of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.settling import Timing

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.certificates import serving_tls
from tests.support.router import chat, serving, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.router import Service

SECRET = "the-engines-own-key"  # noqa: S105 - of an engine that is made up
IMPATIENT = Timing(health=0.02, hold=0.3)
STREAM = chat("mark-s hi", stream=True)


def backend(fake: FakeLlamaServer, **access: str) -> dict[str, Any]:
    """A pool of one remote backend."""
    return {"backends": [{"name": "b0", "url": fake.base_url, **access}]}


async def up(service: Service) -> None:
    await service.watcher.until(lambda watcher: ("b0", True) in watcher.changes)


async def test_an_engine_behind_tls_and_a_key_serves_every_kind_of_route(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    tls, authority = serving_tls(tmp_path)
    access = {"api_key": SECRET, "tls_ca": str(authority)}
    async with (
        FakeLlamaServer(api_key=SECRET, tls=tls) as fake,
        serving(
            [fake], ready=False, pool=backend(fake, **access), keys=[{"name": "k", "value": "ours"}]
        ) as s,
    ):
        await up(s)
        s.http.headers["authorization"] = "Bearer ours"
        s.http.headers["x-api-key"] = "ours"
        answer = await s.http.post("/v1/chat/completions", json=STREAM)
        assert "mark-s" in text_of(answer.text)
        body = chat("mark-m hi", max_tokens=6)
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize", "/apply-template"):
            assert (await s.http.post(path, json=body)).status_code == 200
        for path in ("/props", "/slots", "/backends/b0/metrics"):
            answer = await s.http.get(path)
            assert answer.status_code == 200
            assert SECRET not in answer.text
        assert SECRET not in (await s.http.get("/metrics")).text
        for request in fake.requests:
            assert request.header("authorization") == f"Bearer {SECRET}"
            assert request.header("x-api-key") is None
    assert SECRET not in caplog.text


async def test_without_its_key_an_engine_is_of_no_use_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        FakeLlamaServer(api_key=SECRET) as fake,
        serving([fake], ready=False, pool=backend(fake, api_key="another")) as s,
    ):
        await fake.until(lambda f: sum(request.path == "/props" for request in f.requests) > 2)
        assert s.watcher.changes == []
    said = [record.getMessage() for record in caplog.records]
    assert said == ["backend b0 is healthy but of no use: the engine answered /props with status 401"]


@pytest.mark.parametrize("host", ["127.0.0.1", "elsewhere.invalid"])
async def test_a_certificate_that_nobody_vouches_for_is_not_trusted_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    tls, authority = serving_tls(tmp_path, host)
    access = {} if host == "127.0.0.1" else {"tls_ca": str(authority)}
    async with (
        FakeLlamaServer(tls=tls) as fake,
        serving([fake], ready=False, pool=backend(fake, **access), timing=IMPATIENT) as s,
    ):
        answer = await s.chat("hi")
        assert answer.status_code == 503
        assert fake.requests == []
    said = [record.getMessage() for record in caplog.records if record.name.startswith("warmslot")]
    assert len(said) == 1
    assert said[0].startswith("backend b0: no connection by TLS: ")
