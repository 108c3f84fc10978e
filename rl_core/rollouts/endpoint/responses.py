"""`/v1/responses`: the Responses API, translated to a chat call and back. Responses are not stored: `previous_response_id` is refused."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import count
from typing import Any
from uuid import uuid4

from rl_core.rollouts.endpoint.chat import Completed
from rl_core.rollouts.endpoint.errors import bad_request
from rl_core.rollouts.endpoint.history import text_of_content
from rl_core.rollouts.endpoint.pieces import Piece, server_sent


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body as one of a chat call. Raises EndpointError for what this endpoint does not offer."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise bad_request("responses are not stored here; send the whole conversation as input")
    content = body.get("input")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content or []
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    try:
        for item in items:
            _add(messages, item)
        tools = [
            {
                "type": "function",
                "function": {key: value for key, value in tool.items() if key not in ("type", "strict")},
            }
            for tool in body.get("tools") or ()
        ]
        if any(tool["type"] != "function" for tool in body.get("tools") or ()):
            raise ValueError("tools must be functions")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise bad_request(f"input and tools must have the form of the API: {error}") from error
    return {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": "none" if body.get("tool_choice") == "none" else None,
        "max_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
        "response_format": (body.get("text") or {}).get("format"),
    }


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Append an item of the input. Items of one reply, its text and its calls, become one message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item["role"], "content": text_of_content(item["content"])})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = text_of_content(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind != "reasoning":
        raise ValueError(f"an item must be a message, function_call, function_call_output or reasoning, got {kind!r}")


def answer(completed: Completed, *, model: str) -> dict[str, Any]:
    """Return the body of the answer."""
    [choice] = completed.choices
    truncated = choice.finish_reason == "length"
    status = "incomplete" if truncated else "completed"
    output: list[dict[str, Any]] = []
    calls = choice.message.get("tool_calls", ())
    if choice.message["content"] or not calls:
        message = {"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "status": status}
        output.append({**message, "content": [_text(choice.message["content"] or "")]})
    for call in calls:
        item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": call["id"], "status": "completed"}
        output.append({**item, **call["function"]})
    usage = completed.usage
    return {
        **_begun(model),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


async def events(parts: AsyncGenerator[Piece | Completed], *, model: str) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of the call `parts`, those of `pieces.pieces`. Function calls come whole, after the text."""
    sequence_numbers = count()

    def event(kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        return server_sent({"type": kind, "sequence_number": next(sequence_numbers), **fields}, event=kind)

    initial, text = _begun(model), {"item_id": f"msg_{uuid4().hex}", "output_index": 0, "content_index": 0}
    message = {"type": "message", "id": text["item_id"], "role": "assistant", "status": "in_progress", "content": []}

    def open_message() -> Iterator[bytes]:
        yield event("output_item.added", output_index=0, item=message)
        yield event("content_part.added", **text, part=_text(""))

    created = opened = False
    try:
        async for part in parts:
            if not created:
                created = True
                yield event("created", response=initial)
            if isinstance(part, Piece):
                if not part.text:
                    continue
                for opening_event in () if opened else open_message():
                    yield opening_event
                opened = True
                yield event("output_text.delta", **text, delta=part.text, logprobs=[])
                continue
            final = {**answer(part, model=model), "id": initial["id"], "created_at": initial["created_at"]}
            for index, item in enumerate(final["output"]):
                if item["type"] == "message":
                    item["id"] = message["id"]
                    for opening_event in () if opened else open_message():
                        yield opening_event
                    yield event("output_text.done", **text, text=item["content"][0]["text"], logprobs=[])
                    yield event("content_part.done", **text, part=item["content"][0])
                else:
                    call = {"item_id": item["id"], "output_index": index}
                    unfinished = {**item, "status": "in_progress", "arguments": ""}
                    yield event("output_item.added", output_index=index, item=unfinished)
                    yield event("function_call_arguments.delta", **call, delta=item["arguments"])
                    yield event("function_call_arguments.done", **call, name=item["name"], arguments=item["arguments"])
                yield event("output_item.done", output_index=index, item=item)
            yield event(final["status"], response=final)
    finally:
        await parts.aclose()


def _begun(model: str) -> dict[str, Any]:
    """Return a response of which nothing is known yet."""
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
