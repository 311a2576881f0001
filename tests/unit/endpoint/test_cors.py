"""Web pages: off unless the configuration names their origins, and then on every answer, whoever wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from warmslot.router.config import Endpoint

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    import httpx

    from tests.support.router import Service

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.org"
KEYS: list[dict[str, Any]] = [{"name": "a", "value": "ka"}]
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def answers(service: Service, origin: str) -> dict[str, httpx.Headers]:
    """The headers of one answer of each kind: the engine's, the router's own, and errors of both."""
    http, headers = service.http, {"origin": origin, "authorization": "Bearer ka"}
    got = {
        "engine": await http.post(CHAT, json=chat("hi", max_tokens=2), headers=headers),
        "stream": await http.post(CHAT, json=chat("hi", max_tokens=2, stream=True), headers=headers),
        "engine's error": await http.post(CHAT, json={"messages": [{"role": "user"}]}, headers=headers),
        "passed": await http.post("/tokenize", json={"content": "hi"}, headers=headers),
        "pool page": await http.get("/props", headers=headers),
        "models": await http.get("/v1/models", headers=headers),
        "health": await http.get("/health", headers=headers),
        "own error": await http.post(CHAT, content=b"{", headers=headers),
        "no key": await http.get("/v1/models", headers={"origin": origin}),
    }
    assert [answer.status_code for answer in got.values()] == [200, 200, 400, 200, 200, 200, 200, 400, 401]
    return {name: answer.headers for name, answer in got.items()}


async def early(service: Service, origin: str) -> dict[str, str]:
    """The headers of a stream that begins before the engine has answered."""
    service.fake.token.hold()
    body = chat("mark-a hi", stream=True, max_tokens=2)
    sent = (f"Origin: {origin}", "Authorization: Bearer ka", "Connection: close")
    client = await WireClient.post(service.url, CHAT, body, *sent)
    status, headers = await client.head()
    assert (status, "x-warmslot-backend" in headers) == (200, False)
    service.fake.token.release()
    await client.rest()
    client.leave()
    return headers


async def test_off_means_off_for_every_answer() -> None:
    limits = {"ping_interval": 0.02}
    async with FakeLlamaServer() as fake, serving([fake], keys=KEYS, limits=limits) as service:
        direct = await service.http.get(f"{fake.base_url}/props", headers={"origin": PAGE})
        assert "access-control-allow-origin" in direct.headers  # or there would be nothing to keep back
        seen = [*(await answers(service, PAGE)).values(), await early(service, PAGE)]
        assert [name for headers in seen for name in headers if name.startswith("access-control-")] == []
        assert (await service.http.options(CHAT, headers=PREFLIGHT)).status_code == 401


async def test_without_keys_a_preflight_is_not_granted_by_the_engine(service: Service) -> None:
    answer = await service.http.options(CHAT, headers=PREFLIGHT)
    assert [name for name in answer.headers if name.startswith("access-control-")] == []


@pytest.mark.parametrize("origins", [[PAGE], ["http://localhost:3000", PAGE], ["*"]])
async def test_an_origin_that_is_named_may_read_every_answer(origins: list[str]) -> None:
    endpoint, limits = {"cors_origins": origins}, {"ping_interval": 0.02}
    allowed = "*" if origins == ["*"] else PAGE
    async with (
        FakeLlamaServer() as fake,
        serving([fake], keys=KEYS, endpoint=endpoint, limits=limits) as service,
    ):
        for headers in [*(await answers(service, PAGE)).values(), await early(service, PAGE)]:
            assert headers["access-control-allow-origin"] == allowed
            assert "X-Request-Id" in headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in headers


async def test_a_preflight_needs_no_key_and_no_engine() -> None:
    async with (
        FakeLlamaServer() as fake,
        serving([fake], keys=KEYS, endpoint={"cors_origins": [PAGE]}, ready=False) as service,
    ):
        answer = await service.http.options(CHAT, headers=PREFLIGHT | {"x-request-id": "mine"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert answer.headers["x-request-id"] == "mine"
        assert (await service.http.options(CHAT, headers={"origin": PAGE})).status_code == 401


async def test_an_origin_that_is_not_named_gets_nothing() -> None:
    async with (
        FakeLlamaServer() as fake,
        serving([fake], keys=KEYS, endpoint={"cors_origins": [PAGE]}) as service,
    ):
        for headers in (await answers(service, "https://elsewhere.example.org")).values():
            assert "access-control-allow-origin" not in headers
        refused = await service.http.options(CHAT, headers=PREFLIGHT | {"origin": "https://chat.example.com"})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    "wrong", ["chat.example.org", "https://chat.example.org/", "https://Chat.example.org", "https://", ""]
)
def test_what_no_browser_would_send_as_an_origin(wrong: str) -> None:
    with pytest.raises(ValidationError):
        Endpoint(cors_origins=(wrong,))
