"""Reads tool calls out of generated text."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import uuid4

TAG = "<tool_call>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""The form of Qwen, Hermes and many others: one JSON object per pair of tags."""


def read_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return (text before the calls, tool calls in the form of the chat API); text without a readable call is returned as it is.

    Read are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and a text that is nothing but such an object (Llama writes `parameters`).
    If one of several calls cannot be read, none is: the program sees the text, and can answer the policy.
    """
    tagged = [match.group(1) for match in _TAGGED.finditer(text)]
    content = text.partition(TAG)[0] if tagged else ""
    if not tagged and text.lstrip().startswith("{"):
        tagged = [text]
    calls = [_read(tag_content) for tag_content in tagged]
    if not calls or None in calls:
        return text, []
    return content, [call for call in calls if call is not None]


def _read(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments_json = arguments
    elif isinstance(arguments, dict):
        arguments_json = json.dumps(arguments, ensure_ascii=False)
    else:
        return None
    return {
        "id": f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments_json},
    }
