"""A completion as it is kept for people to look at: texts, token ids, log-probabilities and what the environment said."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_core.api.errors import DataError
from rl_core.api.records import PromptGroupRecord
from rl_core.api.rewards import EXPLANATION, bounded_explanation
from rl_core.batching.rows import Row, read_row
from rl_core.messages.samples import GENERATED, GIVEN, KeptSample

INFO_BYTES = 16 * 1024
"""Largest JSON of one value of `KeptSample.info`; a longer value is left out."""


def keep_sample(record: PromptGroupRecord, index: int, *, group_id: str) -> KeptSample:
    """Return completion `index` of `record` with the engine's numbers. A log whose tokens are malformed is kept with its texts alone."""
    completion = record.completions[index]
    log = completion.message_log or record.prompt
    row: Row | None
    try:
        row = read_row(completion.message_log, record, name=f"{group_id}_g{index}")
    except DataError:
        row = None
    length = row.length if row is not None else 0
    mask = np.full(length, GIVEN, np.uint8)
    engine = np.full(length, np.nan, np.float32)
    versions = np.full(length, -1, np.int32)
    if row is not None:
        mask[row.loss_mask] = GENERATED
        engine[row.loss_mask] = row.log_probs[row.loss_mask]
        versions[:] = row.versions
    return KeptSample(
        group_id=group_id,
        index=index,
        prompt_index=record.prompt_idx,
        info=_plain_info(record.extra_env_info),
        messages=tuple(_message(message, counted=row is not None) for message in log),
        prompt_messages=len(record.prompt),
        reward=float(completion.reward),
        parts={
            name.removeprefix("reward/"): float(value)
            for name, value in completion.metrics.items()
            if name.startswith("reward/") and isinstance(value, int | float)
        },
        reason=str(completion.finish_reason),
        explanation=_explanation(completion.env_extras, record.extra_env_info),
        versions=(int(completion.policy_versions[0]), int(completion.policy_versions[1])),
        token_ids=np.asarray(row.token_ids if row is not None else [], np.int32),
        mask=mask,
        engine=engine,
        token_versions=versions,
    )


def _message(message: Mapping[str, Any], *, counted: bool) -> tuple[str, str, int]:
    return str(message["role"]), str(message["content"]), len(message["token_ids"]) if counted else 0


def _explanation(extras: Mapping[str, Any] | None, columns: Mapping[str, Any] | None) -> str:
    """Return the text with which the environment explained the reward, or "".

    It is the key `explanation` of the environment's metadata. A data set may have a column of that name, which does not count.
    """
    text = (extras or {}).get(EXPLANATION)
    if not isinstance(text, str) or text == (columns or {}).get(EXPLANATION):
        return ""
    return bounded_explanation(text)


def _plain_info(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of `info` that are plain JSON and not too long."""
    plain: dict[str, Any] = {}
    for key, value in (info or {}).items():
        if isinstance(value, float) and not math.isfinite(value):
            continue
        try:
            if len(json.dumps(value, allow_nan=False)) <= INFO_BYTES:
                plain[str(key)] = value
        except (TypeError, ValueError, RecursionError):
            continue
    return plain
