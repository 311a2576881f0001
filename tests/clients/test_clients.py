"""Each client library does with the router what it does with the API that it was written for."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import library

if TYPE_CHECKING:
    from tests.support.router import Service

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
"""Warnings inside a client's own code are its makers' business."""

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}'
"""The call of the tool, put into the mouth of a model too small to make one by itself."""
BEGUN: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}, {"role": "assistant", "content": CALL}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER},
}


async def test_openai_sync(service: Service) -> None:
    openai = library("openai")

    def talk() -> Any:
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="sk-test", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["m"]
            return client.chat.completions.create(model="m", messages=HELLO, max_tokens=6, temperature=0)

    answer = await asyncio.to_thread(talk)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 6
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


async def test_openai_async_stream(service: Service) -> None:
    openai = library("openai")
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="sk-test", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="m", prompt="Once upon", max_tokens=4)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens > 0
    assert text.choices[0].text


async def test_openai_leaves_in_mid_stream(service: Service) -> None:
    openai = library("openai")
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="sk-test", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, max_tokens=400)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
    await service.watcher.until(lambda w: w.reports)
    assert service.watcher.reports[-1].status == "cancelled"


async def test_openai_tools_and_structured_output(service: Service) -> None:
    openai = library("openai")
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="sk-test", max_retries=0) as client:
        called = await client.chat.completions.create(
            model="m", messages=BEGUN, tools=[TOOL], max_tokens=2, temperature=0
        )
        call = called.choices[0].message.tool_calls[0]
        messages = [
            BEGUN[0],
            called.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "It rains."},
        ]
        stream = await client.chat.completions.create(
            model="m", messages=BEGUN, tools=[TOOL], max_tokens=2, temperature=0, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        told = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], max_tokens=8)
        shaped = await client.chat.completions.create(
            model="m",
            messages=HELLO,
            max_tokens=40,
            response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}},
        )
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert [one.function.name for delta in deltas for one in delta.tool_calls or [] if one.function.name]
    assert told.choices[0].finish_reason in {"stop", "length", "tool_calls"}
    assert json.loads(shaped.choices[0].message.content)["city"] in {"Oslo", "Rome"}


async def test_openai_responses(service: Service) -> None:
    openai = library("openai")
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="sk-test", max_retries=0) as client:
        answer = await client.responses.create(model="m", input="Say hello.", max_output_tokens=6)
        events = [
            event.type
            async for event in await client.responses.create(
                model="m", input="Say hello.", max_output_tokens=6, stream=True
            )
        ]
    assert answer.output_text
    assert events[0] == "response.created"
    assert events[-1] == "response.completed"


async def test_openai_is_told_errors_as_it_expects(service: Service) -> None:
    openai = library("openai")
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=HELLO)
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="sk-test", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="m", prompt="word " * 3000)
    assert unknown.value.code == "model_not_found"
    assert "m" in unknown.value.message
    assert long.value.body["n_ctx"] > 0


async def test_anthropic(service: Service) -> None:
    anthropic = library("anthropic")
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER}
    async with anthropic.AsyncAnthropic(base_url=service.url, api_key="sk-test", max_retries=0) as client:
        counted = await client.messages.count_tokens(model="m", messages=HELLO)
        said = await client.messages.create(model="m", messages=HELLO, max_tokens=6)
        async with client.messages.stream(model="m", messages=HELLO, max_tokens=6) as stream:
            pieces = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        called = await client.messages.create(model="m", messages=BEGUN, max_tokens=2, tools=[tool])
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="nope", messages=HELLO, max_tokens=6)
    assert said.content[0].text
    assert said.usage.input_tokens + said.usage.cache_read_input_tokens == counted.input_tokens
    assert "".join(pieces) == final.content[0].text
    assert [block.input for block in called.content if block.type == "tool_use"] == [{"city": "Oslo"}]
    assert unknown.value.body["error"]["type"] == "not_found_error"


async def test_langchain_agent_with_a_tool(service: Service) -> None:
    chat_openai = library("langchain_openai").ChatOpenAI
    agents, middleware = library("langchain.agents"), library("langchain.agents.middleware")
    tools, messages = library("langchain_core.tools"), library("langchain_core.messages")
    asked: list[str] = []

    @tools.tool
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return "It rains."

    @middleware.wrap_model_call
    async def once(request: Any, handler: Any) -> Any:
        """Put the call into the model's mouth, once."""
        if any(isinstance(message, messages.ToolMessage) for message in request.messages):
            return await handler(request)
        return await handler(request.override(messages=[*request.messages, messages.AIMessage(CALL)]))

    model = chat_openai(
        base_url=f"{service.url}/v1",
        api_key="sk-test",
        model="m",
        max_tokens=4,
        max_retries=0,
        temperature=0,
    )
    agent = agents.create_agent(model, [weather], middleware=[once])
    state = await agent.ainvoke({"messages": [{"role": "user", "content": "Weather in Oslo?"}]})
    assert asked == ["Oslo"]
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]


async def test_litellm(service: Service) -> None:
    litellm = library("litellm")
    more = {"api_base": f"{service.url}/v1", "api_key": "sk-test", "max_tokens": 6, "num_retries": 0}
    answer = await litellm.acompletion(model="openai/m", messages=HELLO, **more)
    stream = await litellm.acompletion(model="openai/m", messages=HELLO, stream=True, **more)
    chunks = [chunk async for chunk in stream]
    more["api_base"] = service.url
    claude = await litellm.acompletion(model="anthropic/m", messages=HELLO, **more)
    assert answer.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert claude.choices[0].message.content


async def test_curl(service: Service) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4, "stream": True})
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sSN", "--fail-with-body", f"{service.url}/v1/chat/completions"),
        *("-H", "Authorization: Bearer sk-test", "-H", "Content-Type: application/json", "-d", body),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.startswith(b"data: {")
    assert output.endswith(b"data: [DONE]\n\n")
