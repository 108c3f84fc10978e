"""Histories of chat messages as digests, so that a call is matched with the earlier call that it continues.

Two histories are equal if the model reads the same in them: fields that clients add or drop (`refusal`, `annotations`, ids of tool calls
on the assistant's side, null values) do not count, and neither does whitespace around the text of an assistant message, which clients
and chat templates strip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

Digest = bytes


def text_of_content(content: Any) -> str:
    """Return the text of a message's `content`: a string, None, or a list of parts of type text.

    Raises ValueError for parts of another type, such as images.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(
        f"content must be text or a list of parts of type text, got {str(content)[:80]!r}; this endpoint reads text only"
    )


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return `message` as chat templates expect it: text content, and the arguments of tool calls as objects.

    Raises ValueError for a message without a role or with content that is not text.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"a message must have a role, got {str(dict(message))[:80]}")
    # OpenAI's newer name of the role `system`, which chat templates do not know.
    role = "system" if role == "developer" else role
    result: dict[str, Any] = {"role": role, "content": text_of_content(message.get("content"))}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    return result


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call must have function.name, got {str(call)[:80]}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def root(settings: Mapping[str, Any]) -> Digest:
    """Return the digest of the empty history under the template's `settings` (tools and variables)."""
    return _digest(b"", {key: value for key, value in settings.items() if value is not None})


def extended(digest: Digest, message: Mapping[str, Any]) -> Digest:
    """Return the digest of a history with `message`, which is one of `for_template`, at its end."""
    entry = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message["role"] == "assistant":
        entry["content"] = message["content"].strip()
        entry["tool_calls"] = [call["function"] for call in message.get("tool_calls") or ()]
    return _digest(digest, entry)


def prefixes(digest: Digest, messages: Sequence[Mapping[str, Any]]) -> Iterator[Digest]:
    """Yield the digests of the histories that end with each of `messages`, which follow the history `digest`."""
    for message in messages:
        digest = extended(digest, message)
        yield digest


def of_tokens(ids: Sequence[int]) -> Digest:
    """Return the digest of a history that was given as token ids."""
    return _digest(b"ids", list(ids))


def _digest(prefix: bytes, value: Any) -> Digest:
    return blake2b(
        prefix + json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
