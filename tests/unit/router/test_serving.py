"""The ordinary way of a request: routes, headers, streams, truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.unit.router.conftest import Service


async def test_answers_chat_with_the_engines_body_and_our_headers(service: Service) -> None:
    answer = await service.chat("mark-a hello", max_tokens=4)
    assert answer.status_code == 200, answer.text
    assert "mark-a" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-warmslot-backend"] == "b0"
    assert answer.headers["x-warmslot-decision"] == "fresh"
    assert service.fake.violations == []
