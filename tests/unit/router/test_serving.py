"""The ordinary way of a request: routes, headers, streams, truth."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving, text_of

if TYPE_CHECKING:
    from tests.support.router import Service


def events(text: str) -> list[Any]:
    """The JSON data of an event stream, without its end mark."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


async def test_answers_chat_with_the_engines_body_and_our_headers(service: Service) -> None:
    answer = await service.chat("mark-a hello", max_tokens=6)
    assert answer.status_code == 200
    assert "mark-a" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-warmslot-backend"] == "b0"
    assert answer.headers["x-warmslot-slot"] in {"0", "1", "2", "3"}
    assert answer.headers["x-warmslot-decision"] == "fresh"
    assert answer.headers["x-warmslot-predicted-tokens"] == "0"
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert service.fake.violations == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("mark-r hi")),
        ("/chat/completions", chat("mark-r hi")),
        ("/v1/completions", {"prompt": "mark-r hi"}),
        ("/completion", {"prompt": "mark-r hi"}),
        ("/completions", {"prompt": "mark-r hi"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_generating_route_is_pinned(
    service: Service, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = await service.http.post(path, json={**body, "stream": stream, "max_tokens": 6})
    assert answer.status_code == 200
    assert "mark-r" in text_of(answer.text)
    sent = service.fake.generations()[-1]
    assert sent.path == path
    assert sent.json["id_slot"] == int(answer.headers["x-warmslot-slot"])
    assert sent.slots == [sent.json["id_slot"]]
    assert service.watcher.reports[-1].truth_missing is False
    assert service.router.dispatcher.held() == {}


async def test_a_stream_is_the_engines_bytes(service: Service) -> None:
    body = chat("mark-s hello", max_tokens=5, stream=True)
    async with service.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = (await answer.aread()).decode()
    assert text.endswith("data: [DONE]\n\n")
    assert events(text)[-1]["timings"]["prompt_n"] > 0


async def test_the_next_turn_goes_to_its_slot_and_the_prediction_is_exact(service: Service) -> None:
    messages: list[Any] = [{"role": "user", "content": "mark-t " + "tell me of the sea " * 20}]
    first = await service.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
    await service.chat("mark-u something else " * 20, max_tokens=4)
    messages += [first.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = await service.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
    assert second.headers["x-warmslot-slot"] == first.headers["x-warmslot-slot"]
    assert second.headers["x-warmslot-decision"] == "affinity"
    cached = second.json()["timings"]["cache_n"]
    assert cached > 80
    assert abs(int(second.headers["x-warmslot-predicted-tokens"]) - cached) <= 2


async def test_request_ids_are_kept_if_they_are_sane(service: Service) -> None:
    for given, kept in (("my-id.1", True), ("x" * 200, False), ("a b", False)):
        answer = await service.http.get("/health", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) is kept
    assert (await service.chat("mark-i hi")).headers["x-request-id"]


async def test_headers_that_end_here_do_not_reach_the_engine(service: Service) -> None:
    headers = {
        "x-conversation-id": "c",
        "x-warmslot-priority": "batch",
        "x-warmslot-session": "s",
        "te": "trailers",
        "x-other": "kept",
        "authorization": "Bearer theirs",
    }
    await service.http.post("/v1/chat/completions", json=chat("mark-h hi"), headers=headers)
    sent = service.fake.generations()[-1]
    names = {name.lower() for name, _ in sent.headers}
    assert not names & {b"x-conversation-id", b"x-warmslot-priority", b"x-warmslot-session", b"te"}
    assert sent.header("x-other") == "kept"
    assert sent.header("authorization") == "Bearer theirs"
    request = service.watcher.granted_leases[-1].request
    assert (request.priority, request.session) == ("batch", "s")


async def test_models_tell_the_context_of_a_slot(service: Service) -> None:
    for path in ("/v1/models", "/models"):
        [model] = (await service.http.get(path)).json()["data"]
        assert model["id"] == "m"
        assert model["aliases"] == ["alias"]
        assert model["meta"]["n_ctx"] == service.fake.context
        assert model["meta"]["slots"] == service.fake.n_slots


@pytest.mark.parametrize("model", ["m", "alias", "", None])
async def test_a_model_is_found_by_its_names(service: Service, model: str | None) -> None:
    assert (await service.chat("mark-n hi", model=model)).status_code == 200


async def test_health_says_whether_anything_serves() -> None:
    async with FakeLlamaServer() as fake, serving([fake], ready=False) as service:
        answer = await service.http.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "unavailable_error"
        await service.router.dispatcher.fleet.backend_ready("b0", fake.base_url, 4, 2048, fresh=True)
        for path in ("/health", "/v1/health"):
            assert (await service.http.get(path)).json() == {"status": "ok"}


async def test_other_routes_pass_through(service: Service) -> None:
    answer = await service.http.post("/tokenize", json={"content": "hi there"})
    assert answer.json()["tokens"]
    assert answer.headers["x-warmslot-backend"] == "b0"
    props = await service.http.get("/props?x=1")
    assert props.json()["total_slots"] == 4
    assert service.fake.requests[-1].query == "x=1"
    assert (await service.http.get("/no/such")).status_code == 404
    assert service.watcher.granted_leases == []


async def test_a_request_of_which_the_slot_cannot_be_foreseen_runs_alone(service: Service) -> None:
    fake = service.fake
    fake.missing.add("apply-template")
    fake.token.hold()
    messages = asyncio.create_task(
        service.http.post("/v1/messages", json={**chat("mark-m hi"), "max_tokens": 6, "stream": True})
    )
    await fake.until(lambda f: f.busy == 1)
    other = asyncio.create_task(service.chat("mark-o hi", max_tokens=2))
    await service.watcher.until(lambda w: w.level.get("m") == 2)
    assert service.router.dispatcher.queued("m") == 1
    fake.token.release()
    answer = await messages
    assert answer.status_code == 200
    assert "message_stop" in answer.text
    assert answer.headers["x-warmslot-decision"] == "unpinned"
    assert "id_slot" not in fake.generations()[0].json
    assert (await other).status_code == 200
    assert fake.violations == []


async def test_slot_actions_are_off(service: Service) -> None:
    answer = await service.http.post("/slots/0?action=erase")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "slot_actions_off"


async def test_an_engines_own_metrics_can_be_read(service: Service) -> None:
    assert "llamacpp:requests_deferred 0" in (await service.http.get("/backends/b0/metrics")).text
    answer = await service.http.get("/backends/nope/metrics")
    assert answer.status_code == 404
    assert "b0" in answer.json()["error"]["message"]


async def test_an_engines_refusal_passes_intact_and_leaves_the_slot_as_it_was(service: Service) -> None:
    first = await service.chat("mark-k hello " * 20, max_tokens=2)
    answer = await service.chat("too long " * 3000, max_tokens=2)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "exceed_context_size_error"
    assert answer.json()["error"]["n_ctx"] == service.fake.context
    again = await service.chat("mark-k hello " * 20, max_tokens=2)
    assert again.headers["x-warmslot-slot"] == first.headers["x-warmslot-slot"]
    assert again.json()["timings"]["prompt_n"] == 1


async def test_a_prompt_that_is_too_long_is_not_tried_again_elsewhere() -> None:
    async with FakeLlamaServer() as one, FakeLlamaServer() as two, serving([one, two]) as service:
        answer = await service.chat("too long " * 3000)
        assert (answer.status_code, answer.json()["error"]["n_ctx"]) == (400, one.context)
        assert len(one.generations()) + len(two.generations()) == 1


@pytest.mark.parametrize("scheduling", [{}, {"in_flight": "slots", "queue": "fifo"}])
async def test_of_two_requests_for_one_slot_the_second_waits_here(scheduling: dict[str, str]) -> None:
    """Sent to a busy slot it would wait in the engine, or find there what the first is about to lose."""
    async with FakeLlamaServer(slots=1) as fake, serving([fake], scheduling=scheduling) as service:
        text = "mark-t " + "one conversation " * 40
        await service.chat(text, max_tokens=2)
        fake.token.hold()
        both = [asyncio.create_task(service.chat(text, max_tokens=2)) for _ in range(2)]
        await service.watcher.until(lambda w: w.level["m"] == 2)
        await fake.token.arrived()
        assert (fake.busy, service.router.dispatcher.queued("m")) == (1, 1)
        fake.token.release()
        for answer in await asyncio.gather(*both):
            assert answer.json()["timings"]["prompt_n"] == 1
        assert (fake.violations, fake.deferred_total) == ([], 0)


async def test_several_choices_take_several_slots(service: Service) -> None:
    answer = await service.chat("mark-c hi", n=2, max_tokens=3)
    assert len(answer.json()["choices"]) == 2
    assert len(service.watcher.granted_leases[-1].extra_slots) == 1
    refused = await service.chat("mark-c hi", n=9, max_tokens=3)
    assert refused.status_code == 400
    assert "at most 4" in refused.json()["error"]["message"]
    assert service.fake.violations == []


async def test_two_backends_share_the_work() -> None:
    async with (
        FakeLlamaServer(slots=1) as one,
        FakeLlamaServer(slots=1) as two,
        serving([one, two]) as service,
    ):
        one.token.hold()
        two.token.hold()
        tasks = [asyncio.create_task(service.chat(f"mark-w{n} hi", max_tokens=2)) for n in range(2)]
        await asyncio.gather(one.until(lambda f: f.busy == 1), two.until(lambda f: f.busy == 1))
        one.token.release()
        two.token.release()
        answers = await asyncio.gather(*tasks)
        assert {answer.headers["x-warmslot-backend"] for answer in answers} == {"b0", "b1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["", [""]])
async def test_an_empty_prompt_gets_the_engines_answer(service: Service, text: Any, stream: bool) -> None:
    body = {"prompt": text, "max_tokens": 2, "stream": stream}
    answer = await service.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert "internal error" not in answer.text
    assert service.router.dispatcher.held() == {}
    assert (await service.chat("mark-n next")).status_code == 200


async def test_what_watches_may_fail_and_nothing_else_does(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    async with FakeLlamaServer() as fake, serving([fake], observers=[cast("Any", Failing())]) as service:
        for number in range(3):
            assert (await service.chat(f"mark-{number} hello")).status_code == 200
        assert service.router.dispatcher.held() == {}
        assert service.watcher.level == {"m": 0}
    assert "Failing failed" in caplog.text


@pytest.mark.parametrize("given", [None, "my-id-1"])
async def test_the_id_on_the_answer_is_the_one_in_the_records(service: Service, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    for number in range(2):
        answer = await service.http.post("/v1/chat/completions", json=chat(f"a {number}"), headers=headers)
        shown = answer.headers["x-request-id"]
        assert service.watcher.reports[-1].request.id.startswith(shown)
        assert given is None or shown == given
    assert len({report.request.id for report in service.watcher.reports}) == 2
