"""What `rljob top` of a cluster job shows of its status."""

import io

import pytest
from rich.console import Console

from rl_core.cli.cluster_view import render

ROLES = [{"name": "actor", "ready": 1, "desired": 1}, {"name": "rollout", "ready": 3, "desired": 3}]


def shown(job=None, **status) -> dict[str, list[str]]:
    """Return the words of each line of the tables of `job` by its first word."""
    text = io.StringIO()
    Console(file=text, width=200).print(render((job or {}) | {"status": {"phase": "Running", "roles": ROLES} | status}))
    return {words[0]: words for line in text.getvalue().splitlines() if (words := line.split())}


@pytest.mark.parametrize(
    ("shares", "expected"), [([], "-"), (["0.93"], "93%"), (["0.93", "0.40", "1.00"], "40%..100%")]
)
def test_the_row_of_the_rollouts_tells_the_least_and_the_most_busy_one(shares, expected):
    lines = shown(busy=[{"name": f"rollout:{index}", "value": share} for index, share in enumerate(shares)])
    column = lines["ROLE"].index("BUSY")
    assert lines["rollout"][column] == expected and lines["actor"][column] == "-"


def test_a_job_the_operator_has_not_seen_has_a_row_of_dashes():
    assert shown(roles=[], phase="")["Pending"][1:3] == ["-", "-"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"env": {"type": "reward", "reward": "mine:score"}}, "0.730"),
        ({"env": {"type": "math"}}, "0.000"),
        ({"env": {"type": "math"}, "unknown": 1}, "0.000"),
    ],
    ids=["own reward", "judged", "of another version"],
)
def test_the_validation_metric_is_that_of_the_console(spec, told):
    metrics = [{"name": "val/accuracy", "value": "0"}, {"name": "val/reward_mean", "value": "0.73"}]
    job = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "sums", "namespace": "team", "uid": "u", "managedFields": []},
        "spec": {"model": {"path": "m"}, "data": {"train": "t"}} | spec,
    }
    lines = shown(job, metrics=metrics)
    assert lines["Running"][lines["PHASE"].index("VAL")] == told
