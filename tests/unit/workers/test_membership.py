"""Who is in the job, over a clock that the tests move: registration, silence, fencing, and what other members are told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import EpochFenced
from rl_core.messages.members import (
    WIRE_VERSION,
    Heartbeat,
    HeartbeatAnswer,
    HelloReport,
    MemberId,
    MemberState,
    MemberView,
)
from rl_core.workers.membership import Membership


class Clock:
    """Time that tests move."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def hello(rank=0, *, incarnation=(0, 0), pid=10, role="rollout", registration=0, **changes):
    member = MemberView(
        name=f"{role}:{rank}", role=role, group=role, rank=rank, pod=f"j-{role}-{rank}", pid=pid, host_token="h",
        address=f"tcp://127.0.0.1:{5000 + pid}", incarnation=incarnation, world_size=2,
    )  # fmt: skip
    fields = {"uid": "u", "epoch": 3, "wire_version": WIRE_VERSION, "registration": registration} | changes
    return HelloReport(member=member, **fields)


def process(rank=0, incarnation=(0, 0)):
    return MemberId(name=f"rollout:{rank}", incarnation=incarnation)


def beat(state="joining", **report):
    return Heartbeat(state=MemberState(state), **report)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return Membership(uid="u", epoch=3, suspect_seconds=6, lost_seconds=15, clock=clock)


def advance(table, clock, seconds, step=0.5):
    """Let time pass as the hub does: with a sweep every half second."""
    for _ in range(round(seconds / step)):
        clock.now += step
        table.sweep()


def test_who_says_hello_is_a_member_in_everybodys_view(table):
    assert table.hello(hello(0)) is None and table.hello(hello(1, pid=11)) is None
    assert [m.name for m in table.view().members] == ["rollout:0", "rollout:1"]
    assert [(c.kind, c.member.name) for c in table.take_changes()] == [("joined", "rollout:0"), ("joined", "rollout:1")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"uid": "other"}, "wrong_job"),
        ({"wire_version": 0}, "wire_version"),
        ({"epoch": 2}, "older_epoch"),
        ({"epoch": 4}, "newer_epoch"),
    ],
    ids=["job", "wire", "older", "newer"],
)
def test_a_refused_hello_has_a_reason_and_registers_nobody(table, changes, reason):
    assert table.hello(hello(**changes)) == reason
    assert table.members() == [] and table.take_changes() == []


def test_two_processes_of_one_rank_and_incarnation_are_a_duplicate(table):
    table.hello(hello(pid=10))
    assert table.hello(hello(pid=11)) == "duplicate_rank"
    assert table.get("rollout:0").pid == 10


def test_a_lower_incarnation_is_refused_and_its_heartbeat_fenced(table):
    table.hello(hello(incarnation=(1, 0), pid=20))
    assert table.hello(hello(incarnation=(0, 3), pid=19)) == "duplicate_rank"
    with pytest.raises(EpochFenced, match=r"rollout:0 incarnation 0\.3 was replaced by 1\.0"):
        table.heartbeat(process(0, (0, 3)), beat())


def test_a_higher_incarnation_replaces_the_old_member_which_is_told_lost_first(table):
    table.hello(hello(pid=10))
    table.take_changes()
    assert table.hello(hello(pid=11, incarnation=(0, 1))) is None
    told = [(c.kind, c.member.incarnation) for c in table.take_changes()]
    assert told == [("lost", (0, 0)), ("joined", (0, 1))]


def test_a_process_that_says_hello_again_counts_as_lost_and_joined(table):
    table.hello(hello())
    table.take_changes()
    assert table.hello(hello()) is None
    assert [c.kind for c in table.take_changes()] == ["lost", "joined"]


def test_a_hello_said_again_as_its_answer_was_late_changes_nothing(table, clock):
    table.hello(hello(registration=1))
    table.heartbeat(process(0), beat("constructing"))
    table.take_changes()
    advance(table, clock, 5)
    assert table.hello(hello(registration=1)) is None
    assert [m.state for m in table.view().members] == [MemberState.CONSTRUCTING]
    advance(table, clock, 5)
    assert table.get("rollout:0").state is MemberState.CONSTRUCTING, "a sign of life it is"
    assert table.take_changes() == []


@pytest.mark.parametrize("gone", [False, True])
def test_a_process_that_started_over_counts_as_lost_and_joined(table, gone):
    table.hello(hello(registration=1))
    if gone:
        table.declare_lost(process(0), "it could not join")
    assert table.hello(hello(registration=1 if gone else 2)) is None
    assert [c.kind for c in table.take_changes()] == ["joined", "lost", "joined"]


def test_the_lost_and_the_drained_are_listed_for_those_who_ask(table):
    table.hello(hello(0))
    table.hello(hello(1, pid=11))
    table.declare_lost(process(0), "it could not join")
    table.goodbye(process(1))
    assert table.members() == []
    assert [m.name for m in table.members(drained=True)] == ["rollout:1"]
    assert [m.name for m in table.members(drained=True, lost=True)] == ["rollout:0", "rollout:1"]


def test_silence_makes_suspect_then_lost_and_a_heartbeat_in_between_heals(table, clock):
    table.hello(hello())
    table.heartbeat(process(0), beat("serving"))
    advance(table, clock, 6.5)
    assert table.get("rollout:0").state is MemberState.SUSPECT
    table.heartbeat(process(0), beat("serving"))
    assert table.get("rollout:0").state is MemberState.SERVING
    advance(table, clock, 15.5)
    assert table.get("rollout:0").state is MemberState.LOST and table.members() == []
    lost = [c for c in table.take_changes() if c.kind == "lost"]
    assert len(lost) == 1 and "no heartbeat for 15.5 s" in lost[0].reason


def test_a_pause_of_the_hub_itself_is_no_silence_of_others(table, clock):
    table.hello(hello())
    advance(table, clock, 1)
    clock.now += 3600
    table.sweep()
    assert table.get("rollout:0").state is MemberState.JOINING
    advance(table, clock, 15.5)
    assert table.get("rollout:0").state is MemberState.LOST


def test_a_childs_end_is_a_loss_at_once_but_an_older_childs_is_no_news(table):
    table.hello(hello(incarnation=(0, 1)))
    table.take_changes()
    table.child_ended(process(0), 137)
    assert table.take_changes() == []
    table.child_ended(process(0, (0, 1)), 137)
    assert [(c.kind, c.reason) for c in table.take_changes()] == [("lost", "its process ended with code 137")]


def test_a_member_that_said_goodbye_is_drained_and_no_longer_listed(table):
    table.hello(hello())
    table.goodbye(process(0))
    assert table.get("rollout:0").state is MemberState.DRAINED and table.members("rollout") == []


@pytest.mark.parametrize("gone", ["never seen", "lost"])
def test_a_heartbeat_of_a_stranger_is_answered_with_say_hello(table, gone):
    if gone == "lost":
        table.hello(hello())
        table.child_ended(process(0), 1)
    assert table.heartbeat(process(0), beat()) == HeartbeatAnswer(known=False)


def test_a_member_joins_once_per_registration_even_through_a_suspicion(table, clock):
    table.hello(hello())
    table.heartbeat(process(0), beat("constructing"))
    advance(table, clock, 7)
    for state in ("ready", "serving", "updating", "serving"):
        table.heartbeat(process(0), beat(state))
    assert [c.kind for c in table.take_changes()] == ["joined"]
    table.hello(hello())
    table.heartbeat(process(0), beat("ready"))
    assert [c.kind for c in table.take_changes()] == ["lost", "joined"]


def test_a_heartbeat_is_answered_with_the_members_that_changed_since_the_last_view_and_no_others(table):
    table.hello(hello(0))
    table.hello(hello(1, pid=11))
    known = table.view().version
    assert table.heartbeat(process(1), beat(view_version=known)).view is None
    table.heartbeat(process(0), beat("serving", policy_version=7, digest="d"))
    moved = table.heartbeat(process(1), beat(view_version=known)).view
    assert [(m.name, m.state) for m in moved.members] == [("rollout:0", "ready")]
    assert table.heartbeat(process(1), beat(view_version=moved.version)).view is None


def test_a_view_version_that_this_hub_never_gave_out_is_answered_with_the_whole_view(table):
    table.hello(hello(0))
    table.hello(hello(1, pid=11))
    answer = table.heartbeat(process(1), beat(view_version=99))
    assert [m.name for m in answer.view.members] == ["rollout:0", "rollout:1"]


def test_a_weight_sync_moves_the_hubs_version_and_nobodys_view(table):
    table.hello(hello(0))
    table.heartbeat(process(0), beat("ready"))
    version, seen = table.revision, table.view().version
    for state, weights in (("updating", None), ("updating", 7), ("serving", 7)):
        answer = table.heartbeat(process(0), beat(state, policy_version=weights, view_version=seen))
        assert answer.view is None
    assert table.revision == version + 3 and table.get("rollout:0").policy_version == 7


def test_a_group_sees_the_groups_that_it_may_call_and_the_number_of_its_own_members_that_serve(clock):
    table = Membership(uid="u", epoch=3, views={"rollout": {"env"}, "env": set()}, clock=clock)
    for role in ("rollout", "env"):
        for rank in range(2):
            table.hello(hello(rank, role=role, pid=10 * rank + len(role)))
    for rank in range(2):
        table.heartbeat(process(rank), beat("serving"))
    answer = table.heartbeat(process(0), beat("serving"))
    assert [m.name for m in answer.view.members] == ["env:0", "env:1"] and answer.num_serving == 2
    assert table.heartbeat(MemberId(name="env:0", incarnation=(0, 0)), beat("ready")).view is None
    table.declare_lost(process(1), "it could not join")
    answer = table.heartbeat(process(0), beat("serving", view_version=answer.view.version))
    assert [m.state for m in answer.view.members] == ["ready"] and answer.num_serving == 1


def test_progress_alone_does_not_move_the_view(table):
    table.hello(hello(0))
    version, seen = table.revision, table.view().version
    table.heartbeat(process(0), beat(progress={"tokens": 5}))
    assert (table.revision, table.view().version) == (version, seen)
    assert table.get("rollout:0").progress == {"tokens": 5}


steps = st.one_of(
    st.tuples(st.just("hello"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("beat"), st.integers(0, 2), st.sampled_from(["joining", "constructing", "ready", "serving"])),
    st.tuples(st.just("ended"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("time"), st.floats(0.1, 20), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=40))
def test_whatever_happens_views_by_parts_equal_the_whole_and_comings_and_goings_alternate(script):
    clock = Clock()
    table = Membership(uid="u", epoch=3, suspect_seconds=6, lost_seconds=15, clock=clock)
    follower, known, present = {}, -1, {}
    for kind, a, b in script:
        if kind == "hello":
            table.hello(hello(a, incarnation=(b, 0), pid=100 * a + b, registration=b % 2))
        elif kind == "beat":
            member = table.get(f"rollout:{a}")
            if member is not None:
                table.heartbeat(member.id, beat(b))
        elif kind == "ended":
            table.child_ended(process(a, (b, 0)), 1)
        else:
            advance(table, clock, a)
        part = table.view(since=known)
        known = part.version
        follower |= {member.name: member for member in part.members}
        for change in table.take_changes():
            if change.kind == "joined":
                assert change.member.name not in present
                present[change.member.name] = change.member.incarnation
            else:
                assert present.pop(change.member.name) == change.member.incarnation
    whole = {member.name: member for member in table.view().members}
    assert follower == whole
    assert sorted(present) == [m.name for m in table.members()]
