"""Bringing a member in: tried again while it lives, and given up for all to see where that does not help."""

from types import SimpleNamespace

import pytest

from rl_core.api.errors import InfrastructureError
from rl_core.runner import membership
from rl_core.runner.membership import Membership
from rl_core.workers.member import Member

ROLLOUT = Member(
    name="rollout:0", role="rollout", group="rollout", rank=0, pod="j-rollout-0", address="tcp://127.0.0.1:1", pid=1, host_token="",
    incarnation=(1, 0),
)  # fmt: skip


class Present:
    """Stands in for the cluster and its hub: one live rollout whose `init_worker` fails so many times."""

    def __init__(self, failures):
        self.failures = failures
        self.calls, self.given_up = [], []
        self.hub = SimpleNamespace(get=lambda name: ROLLOUT, give_up=lambda *told: self.given_up.append(told))

    def call(self, name, method, *args, timeout):
        self.calls.append(method)
        if self.calls.count("init_worker") <= self.failures:
            raise InfrastructureError("no route")


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_live_member_that_cannot_join_is_told_as_lost_and_does_not_wait_for_ever(monkeypatch, failures):
    monkeypatch.setattr(membership, "RETRY_PAUSES", (0.0, 0.0, 0.0))
    cluster = Present(failures)
    group = SimpleNamespace(construct=lambda member: None)
    joins = Membership(cluster, {"rollout": group}, deadline=1.0)
    joins.welcome(ROLLOUT)
    joins._pool.shutdown(wait=True)
    assert cluster.calls == ["init_worker"] * min(failures + 1, 3)
    told = [(ROLLOUT, "it could not join in 3 attempts: no route")]
    assert cluster.given_up == (told if failures == 3 else [])
