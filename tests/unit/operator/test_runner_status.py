"""What is kept of a runner's status: all that a decision reads, and never more than a bound, whatever the runner sends."""

from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from rljob_operator.reconcile import runner_status
from rljob_operator.runtime.progress import LARGEST
from tests.unit.operator.states import bytes_of_a_state, state
from tests.unit.operator.test_reconcile_properties import MANY, look


@MANY
@given(bytes_of_a_state)
def test_what_is_left_out_changes_no_plan(data: bytes) -> None:
    job, observed = state(data)
    if observed.progress is not None:
        kept = replace(observed.progress, status=runner_status.kept(observed.progress.status))
        assert repr(look(job, replace(observed, progress=kept))) == repr(look(job, observed)), "repr: NaN equals itself"


def test_every_field_that_a_decision_reads_is_kept() -> None:
    whole: dict[str, Any] = {
        "epoch": 1,
        "phase": "Training",
        "step": 3,
        "totalSteps": 9,
        "policyVersion": 2,
        "reward": 0.5,
        "appliedGeneration": 4,
        "checkpoint": {"lastStep": 2, "path": "/p", "time": "2025-06-15T15:06:40Z", "bestStep": 1, "bestReward": 0.25},
        "streaks": {"klBlowUp": 1},
        "metrics": {"train/loss": 1.5, "mismatch/share_clipped": 0.5},
        "failure": {"type": "WeightsDiverged", "message": "m"},
        "stall": {"reason": "r", "since": 2.5, "waits": [{"who": "a", "on": "b", "what": "c"}]},
        "roles": [{"name": "rollout", "ready": 1, "lag": 0, "versions": {"7": 1}}],
        "diverged": ["rollout:0"],
        "workload": {
            "full": True,
            "seconds": 60.0,
            "starved": 0.1,
            "busy": 0.5,
            "rollouts": [{"name": "r", "busy": 0.5}],
        },
        "missing": [{"role": "env", "pod": "x-env-0", "name": "env:0"}],
        "members": [{"pod": "x-rollout-0", "state": "serving", "deviceUuids": ["GPU-1"]}],
    }
    more = {"ledger": {"groups": [1, 2]}, "failures": {"a/b": 1}, "members": [{**whole["members"][0], "detail": "x"}]}
    assert runner_status.kept(whole | more) == whole


@pytest.mark.parametrize(
    "text",
    [
        '{"members": [' + ",".join(["{}"] * 340_000) + "]}",
        '{"members": [{"pod": "a", "deviceUuids": [' + ",".join(['"x"'] * 250_000) + "]}]}",
        '{"roles": [{"versions": {' + ",".join(f'"{n}": 1' for n in range(90_000)) + "}}]}",
        '{"ledger": [' + ",".join(["[]"] * 340_000) + "]}",
        '{"diverged": ["' + "x" * 1_000_000 + '"]}',
        '{"step": [' + ",".join(["[1]"] * 250_000) + "]}",
        '{"workload": {"rollouts": [' + ",".join(["[{}]"] * 200_000) + "]}}",
    ],
    ids=["members", "devices", "versions", "unknown", "text", "another form", "rollouts"],
)
def test_a_status_of_many_small_values_keeps_little_memory(text: str) -> None:
    assert len(text) <= LARGEST
    tracemalloc.start()
    kept = runner_status.kept(json.loads(text))
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 3 * runner_status.LARGEST, f"{size} bytes for {list(kept)}"


def test_the_scalars_of_a_status_survive_its_lists() -> None:
    members = [{"pod": f"x-rollout-{n}", "state": "serving"} for n in range(100_000)]
    kept = runner_status.kept({"members": members, "step": 7, "roles": [{"name": "rollout", "ready": 3}]})
    assert kept["step"] == 7 and kept["roles"][0]["ready"] == 3
    assert 1024 <= len(kept["members"]) < 5000 and kept["members"][:2] == members[:2]
