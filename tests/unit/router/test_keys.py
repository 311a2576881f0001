"""Bearer keys."""

from __future__ import annotations

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving

KEYS = [{"name": "anna", "value": "secret-a"}, {"name": "ben", "value": "secret-b"}]


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"authorization": "Bearer secret-a"}, True),
        ({"authorization": "bearer secret-b"}, True),
        ({"x-api-key": "secret-b"}, True),
        ({"authorization": "Bearer secret"}, False),
        ({"authorization": "Bearer secret-ab"}, False),
        ({"authorization": "Basic secret-a"}, False),
        ({"authorization": "Bearer \u00e9".encode("latin-1").decode("latin-1")}, False),
    ],
)
async def test_only_known_keys_come_in(headers: dict[str, str], allowed: bool) -> None:
    async with FakeLlamaServer() as fake, serving([fake], keys=KEYS) as service:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        answer = await service.http.post(
            "/v1/chat/completions", json=chat("mark-a hi", max_tokens=6), headers=raw
        )
        assert answer.status_code == (200 if allowed else 401)
        if not allowed:
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in answer.text
        assert (await service.http.get("/health", headers=raw)).status_code == 200
        assert (await service.http.get("/metrics", headers=raw)).status_code == (200 if allowed else 401)


async def test_keys_stay_here_and_name_their_holder() -> None:
    async with FakeLlamaServer() as fake, serving([fake], keys=KEYS) as service:
        await service.http.post(
            "/v1/chat/completions",
            json=chat("mark-a hi", max_tokens=6),
            headers={"authorization": "Bearer secret-b", "x-api-key": "secret-b"},
        )
        sent = fake.generations()[-1]
        assert sent.header("authorization") is None
        assert sent.header("x-api-key") is None
        text = (await service.http.get("/metrics", headers={"x-api-key": "secret-a"})).text
        assert 'warmslot_client_prompt_tokens_total{client="ben",reuse="processed"}' in text
        assert "secret" not in text
