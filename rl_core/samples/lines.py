"""One kept completion as a line of JSON, and its entry in the index.

A line holds texts and facts as plain JSON and the numbers of its T tokens as base64 of little-endian arrays (ARRAYS), which the page
decodes without a library. Everything but ASCII is escaped, so that a line is valid whatever a sample contains. docs/samples.md
describes each field.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_core.messages.samples import GIVEN, KeptSample

TRAIN, VALIDATION = "train", "validation"
FILTERED = "filtered"
"""`Entry.reason` of the samples of groups that dynamic sampling discarded."""
ARRAYS = {"ids": "<i4", "mask": "<u1", "engine": "<f4", "trainer": "<f4", "advantage": "<f4", "token_versions": "<i4"}
"""Arrays of a line by name, with their type; one that is not there is null."""
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode


class Entry(NamedTuple):
    """What the index knows of a sample; written as a JSON array in this order."""

    offset: int
    """First byte of its line in the data file."""
    length: int
    """Bytes of the line with its end."""
    step: int
    split: str
    group: str
    sample: int
    """Place in its group."""
    reward: float | None
    reason: str
    """Why it ended (FinishReason), or FILTERED."""
    tokens: int
    """Tokens of the response: all after the prompt."""
    epoch: int
    version: int
    """Policy version that the sample trained, or that validation measured."""


def sample_line(
    sample: KeptSample,
    *,
    split: str,
    step: int,
    epoch: int,
    version: int,
    trainer: NDArray[np.float32] | None,
    pieces: Sequence[str],
    wall: float,
) -> tuple[bytes, Entry]:
    """Return the line of a sample and its index entry, whose `offset` is 0; `pieces` are the texts of its tokens, `wall` is the time."""
    ids = sample.token_ids
    prompt_tokens = int(np.argmax(sample.mask != GIVEN)) if (sample.mask != GIVEN).any() else len(ids)
    value = {
        "split": split,
        "step": step,
        "epoch": epoch,
        "version": version,
        "group": sample.group_id,
        "index": sample.index,
        "prompt": sample.prompt_index,
        "time": round(wall, 3),
        "reward": finite(sample.reward),
        "shaped_reward": finite(sample.shaped_reward),
        "parts": {name: finite(part) for name, part in sample.parts.items()},
        "explanation": sample.explanation,
        "reason": sample.reason,
        "error": sample.error,
        "filtered": sample.filtered,
        "versions": list(sample.versions),
        "prompt_tokens": prompt_tokens,
        "response_tokens": len(ids) - prompt_tokens,
        "info": sample.info,
        "prompt_messages": sample.prompt_messages,
        "messages": [{"role": role, "content": content, "tokens": count} for role, content, count in sample.messages],
        "pieces": list(pieces),
    }
    arrays: dict[str, NDArray[Any] | None] = {
        "ids": ids,
        "mask": sample.mask,
        "engine": sample.engine,
        "trainer": trainer,
        "advantage": sample.advantages,
        "token_versions": sample.token_versions,
    }
    value |= {name: None if array is None else to_text(name, array) for name, array in arrays.items()}
    line = _encode(value).encode("ascii") + b"\n"
    reward = finite(sample.reward)
    return line, Entry(
        0,
        len(line),
        step,
        split,
        sample.group_id,
        sample.index,
        reward,
        FILTERED if sample.filtered else sample.reason,
        len(ids) - prompt_tokens,
        epoch,
        version,
    )


def finite(value: float | None) -> float | None:
    """Return `value`, or None for one that JSON has no form for."""
    return float(value) if value is not None and math.isfinite(value) else None


def to_text(name: str, array: NDArray[Any]) -> str:
    """Return the base64 text of the array called `name` (ARRAYS)."""
    return base64.b64encode(np.ascontiguousarray(array, ARRAYS[name]).tobytes()).decode()


def array_of(sample: Mapping[str, Any], name: str) -> NDArray[Any] | None:
    """Return the array `name` of a line that was read; None where the sample has none. Raises ValueError for a damaged one."""
    text = sample.get(name)
    return None if text is None else np.frombuffer(base64.b64decode(text, validate=True), ARRAYS[name])


def index_line(entry: Entry) -> bytes:
    """Return an entry as a line of the index file."""
    return _encode(list(entry)).encode("ascii") + b"\n"


def entry_of(line: bytes, offset: int) -> Entry | None:
    """Return the entry of a line of a data file that starts at `offset`; None for a line that is damaged."""
    try:
        fields = json.loads(line)
        return Entry(
            offset,
            len(line),
            int(fields["step"]),
            str(fields["split"]),
            str(fields["group"]),
            int(fields["index"]),
            fields["reward"],
            FILTERED if fields.get("filtered") else str(fields["reason"]),
            int(fields["response_tokens"]),
            int(fields["epoch"]),
            int(fields["version"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
