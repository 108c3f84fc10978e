"""What members and hub say to each other while the pods of a job are replaced by those of another release."""

from dataclasses import dataclass, field

import pytest

from rl_core.messages.members import (
    DeclaredWait,
    Heartbeat,
    HelloReport,
    MemberState,
    MemberView,
    View,
)
from rl_core.messages.registry import REGISTRY
from rl_core.transports import frames

MEMBER = MemberView(
    name="env:0", role="env", group="env", rank=0, pod="j-env-0", address="tcp://127.0.0.1:1", pid=1, host_token="",
    incarnation=(0, 1), state=MemberState.SERVING,
)  # fmt: skip


def travelled(message):
    return frames.decode([memoryview(part) for part in frames.encode(message)])


@pytest.mark.parametrize(
    "message",
    [
        View(version=3, members=[MEMBER]),
        HelloReport(wire_version=2, uid="u", epoch=1, member=MEMBER, registration=1, device_uuids=("GPU-a",)),
        Heartbeat(state=MemberState.READY, wait=DeclaredWait(what="a step", on="env:0", since_seconds=1.5)),
    ],
    ids=["view", "hello", "heartbeat"],
)
def test_a_message_arrives_as_it_was_sent_its_state_as_a_state(message):
    arrived = travelled(message)
    assert arrived == message
    for record in (arrived, *getattr(arrived, "members", ())):
        if hasattr(record, "state"):
            assert isinstance(record.state, MemberState)


def test_fields_that_a_newer_release_added_are_ignored_and_those_it_left_out_have_their_defaults(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Newer:
        state: str
        mood: str = "good"
        details: dict = field(default_factory=dict)

    monkeypatch.setitem(REGISTRY.by_type, Newer, "Heartbeat")
    monkeypatch.setitem(REGISTRY.fields, Newer, ("state", "mood", "details"))
    assert travelled(Newer(state="serving")) == Heartbeat(state=MemberState.SERVING)
