"""`/v1/messages`: the API of Anthropic's clients, translated to a chat call and back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from uuid import uuid4

from rl_core.rollouts.endpoint.chat import Choice, Completed
from rl_core.rollouts.endpoint.errors import bad_request
from rl_core.rollouts.endpoint.history import text_of_content
from rl_core.rollouts.endpoint.pieces import Piece, server_sent

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Finish reason of a chat call -> `stop_reason`."""


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body as one of a chat call. Raises EndpointError for content that this endpoint cannot read."""
    try:
        messages = [{"role": "system", "content": text_of_content(body["system"])}] if body.get("system") else []
        for message in body.get("messages") or ():
            messages += _as_chat_messages(message)
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema", {}),
                },
            }
            for tool in body.get("tools") or ()
        ]
        tools_disabled = (body.get("tool_choice") or {}).get("type") == "none"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise bad_request(f"messages, system and tools must have the form of the API: {error}") from error
    return {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": "none" if tools_disabled else None,
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences") or None,
        "stream": body.get("stream"),
    }


def _as_chat_messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message as messages of the chat API: each result of a tool is one of its own."""
    content = message["content"]
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    results = [
        {"role": "tool", "tool_call_id": part["tool_use_id"], "content": text_of_content(part.get("content"))}
        for part in content
        if part["type"] == "tool_result"
    ]
    calls = [
        {
            "id": part["id"],
            "type": "function",
            "function": {"name": part["name"], "arguments": json.dumps(part["input"], ensure_ascii=False)},
        }
        for part in content
        if part["type"] == "tool_use"
    ]
    texts = [part for part in content if part["type"] not in ("tool_result", "tool_use", "thinking")]
    if not texts and not calls:
        return results
    chat_message: dict[str, Any] = {"role": message["role"], "content": text_of_content(texts)}
    return [*results, {**chat_message, "tool_calls": calls} if calls else chat_message]


def answer(completed: Completed, *, model: str) -> dict[str, Any]:
    """Return the body of the answer."""
    [choice] = completed.choices
    text = choice.message["content"]
    content = [{"type": "text", "text": text}] if text else []
    return {
        **_head(model),
        "content": [*content, *_tool_uses(choice)],
        "stop_reason": REASONS[choice.finish_reason],
        "usage": _usage(completed),
    }


async def events(parts: AsyncGenerator[Piece | Completed], *, model: str) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of the call `parts`, those of `pieces.pieces`. Numbers of tokens come with the last event."""

    def event(kind: str, **fields: Any) -> bytes:
        return server_sent({"type": kind, **fields}, event=kind)

    started, index = False, 0
    try:
        async for part in parts:
            if not started:
                started = True
                usage = {"input_tokens": 0, "output_tokens": 0}
                yield event(
                    "message_start", message={**_head(model), "content": [], "stop_reason": None, "usage": usage}
                )
                yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            if isinstance(part, Piece):
                if part.text:
                    delta = {"type": "text_delta", "text": part.text}
                    yield event("content_block_delta", index=0, delta=delta)
                continue
            yield event("content_block_stop", index=0)
            [choice] = part.choices
            for index, tool_use in enumerate(_tool_uses(choice), 1):
                yield event("content_block_start", index=index, content_block={**tool_use, "input": {}})
                arguments = {
                    "type": "input_json_delta",
                    "partial_json": json.dumps(tool_use["input"], ensure_ascii=False),
                }
                yield event("content_block_delta", index=index, delta=arguments)
                yield event("content_block_stop", index=index)
            end_fields = {"stop_reason": REASONS[choice.finish_reason], "stop_sequence": None}
            yield event("message_delta", delta=end_fields, usage=_usage(part))
    finally:
        await parts.aclose()
    yield event("message_stop")


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_sequence": None,
    }


def _tool_uses(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _object(call["function"]["arguments"]),
        }
        for call in choice.message.get("tool_calls", ())
    ]


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"arguments": text}  # In this API the input of a tool is always an object.


def _usage(completed: Completed) -> dict[str, int]:
    usage = completed.usage
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
