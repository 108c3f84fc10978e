"""What a rollout reports to the runner about a finished group."""

import math

from rl_core.rollouts.rollout_loop import group_entry
from tests import actor_samples


def test_an_entry_tells_the_runner_what_admission_needs():
    record = actor_samples.make_record(3)
    for index, completion in enumerate(record.completions):
        completion.policy_versions = (5, 5 + index)
    entry = group_entry(record, min_std=0.0)
    assert (entry.group_id, entry.token) == ("0-3", "token-3")
    assert (entry.v_min, entry.v_max) == (5, 8)
    assert entry.tokens == sum(len(c.message_log[-1]["token_ids"]) for c in record.completions)
    assert math.isnan(entry.rewards[0]) and entry.informative is (len(set(entry.rewards[1:])) > 1)
    for completion in record.completions:
        completion.reward = 1.0
    assert group_entry(record, min_std=0.0).informative is False
    record.completions[0].reward = 0.0  # its finish reason is an error: no training row comes of it
    assert group_entry(record, min_std=0.0).informative is False
    assert group_entry(record, min_std=None).informative is True
