"""Anthropic messages and Responses input as the chat body that the engine makes of them.

The engine converts both to a chat before it applies its template, and ``/apply-template`` takes chats only.
So the same conversion here lets the router see the text that the engine will evaluate. Only what can reach
that text is converted. Where a body is of a shape that the engine refuses, there is no chat: ``None``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .values import Route

if TYPE_CHECKING:
    from collections.abc import Mapping

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_PASSED = (
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
    "parallel_tool_calls",
    "response_format",
)
_MEDIA = frozenset({"image_url", "input_audio", "input_image", "input_video", "video_url"})
_BILLING = "x-anthropic-billing-header:"
_STAMP = "cch="
_STAMP_LENGTH = 5


def chat_of(route: Route, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat body of a request on ``/v1/messages`` or ``/v1/responses``; ``None`` where there is none."""
    try:
        return _of_messages(body) if route is Route.MESSAGES else _of_responses(body)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


def has_media(messages: Any) -> bool:
    """Whether any content part is no text: an image's place in the prompt no text can stand for."""
    return any(
        _is_media(part)
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
    )


def _is_media(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _MEDIA


def _string(value: Any, otherwise: str = "") -> str:
    return value if isinstance(value, str) else otherwise


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# -- Anthropic ---------------------------------------------------------------------------------------------


def _of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[Any] = []
    system = body.get("system")
    if system is not None:
        messages.append({"role": "system", "content": _system(system)})
    given = body["messages"]
    for message in given if isinstance(given, list) else ():
        messages += _of_message(message)
    chat: dict[str, Any] = {"messages": messages}
    if isinstance(tools := body.get("tools"), list):
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": _string(tool.get("name")),
                    "description": _string(tool.get("description")),
                    "parameters": tool.get("input_schema", {}),
                },
            }
            for tool in tools
        ]
    if isinstance(choice := body.get("tool_choice"), dict):
        wanted = {"auto": "auto", "any": "required", "tool": "required"}.get(_string(choice.get("type")))
        if wanted is not None:
            chat["tool_choice"] = wanted
    if "chat_template_kwargs" in body:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    return chat


def _system(system: Any) -> str:
    if isinstance(system, str):
        return _without_stamp(system)
    blocks = system if isinstance(system, list) else ()
    return "".join(
        _without_stamp(_string(block.get("text"))) for block in blocks if block.get("type") == "text"
    )


def _without_stamp(text: str) -> str:
    """The engine itself blanks the stamp that one client changes with every call."""
    at = text.find(_STAMP, len(_BILLING)) if text.startswith(_BILLING) else -1
    begin, end = at + len(_STAMP), at + len(_STAMP) + _STAMP_LENGTH
    if at < 0 or text[end : end + 1] != ";":
        return text
    return text[:begin] + "f" * _STAMP_LENGTH + text[end:]


def _of_message(message: Mapping[str, Any]) -> list[Any]:
    role, blocks = _string(message.get("role")), message.get("content")
    if not isinstance(blocks, list):
        return [] if role == "assistant" and "content" not in message else [message]
    content: list[Any] = []
    calls: list[Any] = []
    thought = ""
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            content.append(block)
        elif kind == "thinking":
            thought += _string(block.get("thinking"))
        elif kind == "image":
            content += _image(block)
        elif kind == "tool_use":
            calls.append(_used(block))
    results = [_result(block) for block in blocks if block.get("type") == "tool_result"]
    if not (content or calls or thought):
        return results
    said: dict[str, Any] = {"role": role, "content": content or ""}
    if calls:
        said["tool_calls"] = calls
    if thought:
        said["reasoning_content"] = thought
    return [said, *results]


def _used(block: Mapping[str, Any]) -> dict[str, Any]:
    return _call(_string(block.get("id")), _string(block.get("name")), _dump(block.get("input", {})))


def _image(block: Mapping[str, Any]) -> list[Any]:
    source = block.get("source") or {}
    kind = source.get("type")
    if kind == "base64":
        url = f"data:{_string(source.get('media_type'), 'image/jpeg')};base64,{_string(source.get('data'))}"
    elif kind == "url":
        url = _string(source.get("url"))
    else:
        return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    said: Any = _string(content)
    if isinstance(content, list):
        texts = [part for part in content if part.get("type") == "text"]
        images = [image for part in content if part.get("type") == "image" for image in _image(part)]
        said = "".join(_string(part.get("text")) for part in texts)
        if images:
            said = [{"type": "text", "text": _string(part.get("text"))} for part in texts] + images
    return {"role": "tool", "tool_call_id": _string(block.get("tool_use_id")), "content": said}


# -- Responses ---------------------------------------------------------------------------------------------


def _of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": _string(body["instructions"])})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif not isinstance(given, list):
        raise TypeError("input")
    else:
        for item in given:
            _add_item(messages, item)
    chat: dict[str, Any] = {name: body[name] for name in _PASSED if name in body}
    chat["messages"] = messages
    tools = [_tool(tool) for tool in body.get("tools") or () if tool.get("type") == "function"]
    if tools:
        chat["tools"] = tools
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type"}
    function.setdefault("strict", True)
    return {"type": "function", "function": function}


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """One item of the input; what an assistant says in several items is one message."""
    if isinstance(item, str):
        messages.append({"role": "user", "content": item})
        return
    if not isinstance(item, dict):
        return
    last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    kind, role = _string(item.get("type")), _string(item.get("role"))
    if kind == "reasoning" or "reasoning_content" in item:
        if last is None:
            last = {"role": "assistant", "content": []}
            messages.append(last)
        last["reasoning_content"] = _reasoning(item)
    elif kind in {"function_call", "tool_call"} or ("call_id" in item and "arguments" in item):
        if last is None:
            last = {"role": "assistant"}
            messages.append(last)
        arguments = item.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else _dump(arguments)
        identifier = _string(item.get("call_id"), _string(item.get("id")))
        last.setdefault("tool_calls", []).append(_call(identifier, _string(item.get("name")), text))
    elif (
        kind in {"function_call_output", "tool_result"}
        or role == "tool"
        or ("call_id" in item and "output" in item)
    ):
        messages.append(_output(item))
    else:
        content = _content(item.get("content"))
        if role == "assistant" and last is not None:
            before = last.get("content")
            last["content"] = [*(before if isinstance(before, list) else ()), *content]
        else:
            said = {"role": role or "user", "content": content}
            if "tool_calls" in item:
                said["tool_calls"] = item["tool_calls"]
            messages.append(said)


def _reasoning(item: Mapping[str, Any]) -> str:
    told = item.get("reasoning_content")
    if isinstance(told, str):
        return told
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(part if isinstance(part, str) else _string(part.get("text")) for part in parts)


def _output(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output", item.get("content", ""))
    said: Any
    if isinstance(output, str):
        said = output
    elif isinstance(output, list):
        said = [_text_part(part) for part in output]
    else:
        said = _dump(output)
    identifier = _string(item.get("call_id"), _string(item.get("tool_call_id")))
    return {"role": "tool", "tool_call_id": identifier, "content": said}


def _text_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if _string(part.get("type"), "text") in _TEXT_PARTS:
        return {"type": "text", "text": _string(part.get("text"))}
    return part


def _content(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str) or part.get("type") in _TEXT_PARTS:
            parts.append(_text_part(part))
        elif part.get("type") in {"input_image", "image_url"}:
            if "image_url" in part:
                image = part["image_url"]
                parts.append(
                    {"type": "image_url", "image_url": {"url": image} if isinstance(image, str) else image}
                )
        elif part.get("type") != "refusal" and "text" in part:
            parts.append({"type": "text", "text": _string(part["text"])})
        else:
            parts.append(part)
    return parts
