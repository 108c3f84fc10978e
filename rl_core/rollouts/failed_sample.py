"""Carries the sample that failed a prompt group to the place where the group is returned: the exception holds its message log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl_core.api.records import Completion, FinishReason, PromptGroupRecord
from rl_core.batching.samples import keep_sample
from rl_core.messages.groups import PromptLease
from rl_core.messages.samples import KeptSample

logger = logging.getLogger(__name__)
ATTRIBUTE = "rljob_failed_sample"
MAX_CHARACTERS = 2**20
"""Length of the texts of a failed sample beyond which it is not sent."""


def attach_sample(error: Exception, index: int, log: Sequence[Any]) -> None:
    """Attach the message log of sample `index` of its group to the `error` that the sample ended with."""
    setattr(error, ATTRIBUTE, (index, list(log)))


def failed_sample(error: Exception, lease: PromptLease, message: str) -> KeptSample | None:
    """Return the sample that is attached to `error`, for people to look at; None where there is none. `message` says why it failed."""
    index, log = getattr(error, ATTRIBUTE, (0, []))
    if not log or sum(len(str(part["content"])) for part in log) > MAX_CHARACTERS:
        return None
    version = lease.policy_version
    record = PromptGroupRecord(
        prompt_idx=lease.sample["idx"],
        prompt=lease.sample["message_log"],
        extra_env_info=lease.sample.get("extra_env_info"),
        metadata={},
        completions=[
            Completion(message_log=log, finish_reason=FinishReason.ERROR.value, policy_versions=(version, version))
        ],
    )
    try:
        return replace(keep_sample(record, 0, group_id=lease.group_id), index=index, error=message)
    except Exception:
        logger.exception("the sample that failed group %s is not kept", lease.group_id)
        return None
