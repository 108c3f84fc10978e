"""What the runner does when the hub tells that a member is gone."""

from types import SimpleNamespace

import pytest

from rl_core.runner import __main__ as entry
from rl_core.workers.hub import Member, MemberState


class Told:
    """Stands in for the actor group, the status board and the channel: notes what is said to them."""

    def __init__(self):
        self.heard = []
        self.board = SimpleNamespace(count_failure=lambda role, kind: self.heard.append(("failure", role, kind)))
        self.actor = SimpleNamespace(execute_on=lambda *ranks: SimpleNamespace(receiver_lost=self.receiver_lost))
        self.spec = SimpleNamespace(runtime=SimpleNamespace(deadlines=SimpleNamespace(rpc=5)))
        self.membership = SimpleNamespace(forget=lambda member: self.heard.append(("forgotten", member.name)))
        self.rpc = SimpleNamespace(call_future=lambda *args, timeout: self.heard.append(("channel", *args)))

    def receiver_lost(self, name, reason):
        self.heard.append(("sync", name, reason))


def member(role, state=MemberState.LOST):
    return Member(
        name=f"{role}:1", role=role, group=role, rank=1, pod=f"j-{role}-1", address="tcp://127.0.0.1:1", pid=1, host_token="",
        incarnation=(2, 0), state=state,
    )  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    told = Told()
    monkeypatch.setattr(entry, "current", lambda: told)
    return told


def test_a_lost_rollout_frees_the_sync_and_gives_its_leases_back(told):
    entry._lost(told, member("rollout"), "no heartbeat")
    assert told.heard == [
        ("forgotten", "rollout:1"),
        ("failure", "rollout", "lost"),
        ("sync", "rollout:1", "no heartbeat"),
        ("channel", "consumer_lost", "rollout:1", [2, 0]),
    ]


def test_a_lost_env_is_counted_and_concerns_no_sync(told):
    entry._lost(told, member("env"), "no heartbeat")
    assert told.heard == [("forgotten", "env:1"), ("failure", "env", "lost")]


def test_a_rollout_that_drained_is_no_failure(told):
    entry._lost(told, member("rollout", MemberState.DRAINED), "it drained")
    assert [kind for kind, *_ in told.heard] == ["forgotten", "sync", "channel"]
