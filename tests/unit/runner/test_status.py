"""`/status` tells phases, roles, lag and missing pods as they are."""

from types import SimpleNamespace

import pytest

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.job import RLJobSpec
from rl_core.messages.members import DeclaredWait, MemberState
from rl_core.runner.group_table import GroupState
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.prompts import MOST_GROUPS, Prompts
from rl_core.runner.roster import Roster
from rl_core.runner.stall import explain
from rl_core.runner.status import Phase, StatusBoard
from rl_core.runner.workload import Workload

SOON = {"stall": {"seconds": 10.0}}


def member(name, *, state="serving", version=0, proof="", wait=None, progress=None, last_seen=0.0):
    role, _, rank = name.partition(":")
    own = {"env": {"env/steps_total": 3.0}, "rollout": {"rollout/engines_lost_total": 1.0, "gauge": 5.0}}
    facts = {"metrics": own.get(role, {})}
    facts |= {
        "device_uuids": (),
        "progress": progress or {},
        "wait": wait,
        "last_seen": last_seen,
        "pod": f"j-{role}-{rank}",
        "policy_version": version,
        "weights_proof": proof,
    }
    return SimpleNamespace(name=name, role=role, rank=int(rank), state=state, **facts)


def board(members, **spec):
    job = RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"replicas": 2}, **spec})
    there = SimpleNamespace(members=lambda **which: members)
    failures = {"actor/restart": 1}
    return StatusBoard(
        job, there, Roster(job, there, job="j", patient=False), epoch=2, failures=failures, clock=lambda: 20.0
    )


def snapshot(board):
    return board.snapshot()


def test_a_role_tells_ready_lost_versions_and_lag():
    status_board = board([member("actor:0", state="ready"), member("rollout:0", version=4)])
    status_board.set(policyVersion=5, step=5)
    status = snapshot(status_board)
    rollout = next(role for role in status["roles"] if role["name"] == "rollout")
    assert rollout == {"name": "rollout", "desired": 2, "ready": 1, "lost": 1, "versions": {"4": 1}, "lag": 1}
    assert (status["epoch"], status["step"], status["totalSteps"]) == (2, 5, 200)
    assert status["promptsPerStep"] == AlgorithmSpec().prompts_per_step


def test_a_job_in_simulators_has_no_prompts():
    status_board = board([], program="embodied", env={"type": "gymnasium", "options": {"id": "CartPole-v1"}})
    assert "promptsPerStep" not in snapshot(status_board)


def test_members_are_told_in_the_words_of_the_protocol_and_in_detail():
    states = [state.value for state in MemberState if state is not MemberState.LOST]
    status_board = board([member(f"{role}:0", state=state) for role in ("actor", "rollout", "env") for state in states])
    members = snapshot(status_board)["members"]
    assert {m["state"] for m in members} == {"joining", "updating", "serving", "draining", "drained"}
    assert [m["detail"] for m in members] == states * 3
    assert [m["state"] for m in members if m["detail"] == "ready"] == ["serving", "joining", "serving"]


def test_a_rollout_tells_by_what_its_weights_are_proven():
    proven, fresh = member("rollout:0", version=4, proof="engine tensors"), member("rollout:1")
    assert [m["weightsProof"] for m in snapshot(board([proven, fresh]))["members"]] == ["engine tensors", None]


def test_a_lost_member_is_told_while_it_is_wanted_and_counts_for_nothing():
    gone = [member("rollout:0", state="lost", version=4), member("rollout:7", state="lost", version=4)]
    status = snapshot(board([*gone, member("rollout:1", version=5)]))
    told = {m["name"]: (m["state"], m["policyVersion"], m["deviceUuids"]) for m in status["members"]}
    assert told == {"rollout:0": ("lost", None, []), "rollout:1": ("serving", 5, [])}
    assert [m["name"] for m in status["missing"] if m["role"] == "rollout"] == ["rollout:0"]
    rollout = next(role for role in status["roles"] if role["name"] == "rollout")
    assert (rollout["ready"], rollout["lost"], rollout["versions"]) == (1, 1, {"5": 1})


def test_a_phase_ends_with_its_block_even_by_an_error():
    status_board = board([])
    try:
        with status_board.during(Phase.TRAINING):
            assert status_board.phase is Phase.TRAINING
            raise OSError
    except OSError:
        pass
    assert status_board.phase is Phase.STARTING


def test_waits_of_members_and_of_the_runner_form_the_graph():
    status_board = board([member("rollout:0", wait=DeclaredWait(what="scores", on="env:0", since_seconds=3.0))])
    with status_board.during(Phase.GENERATING):
        waits = {(wait["who"], wait["on"]) for wait in snapshot(status_board)["waits"]}
    assert waits == {("rollout:0", "env:0"), ("runner", "rollout")}


def test_the_runner_says_what_it_waits_for_where_the_phase_does_not():
    status_board = board([])

    def runner():
        return [(wait["on"], wait["what"]) for wait in snapshot(status_board)["waits"] if wait["who"] == "runner"]

    with status_board.during(Phase.STARTING, on="actor", what="its model"):
        assert runner() == [("actor", "its model")]
        with status_board.during(Phase.TRAINING):
            assert runner() == [("actor", "training")]
        assert runner() == [("actor", "its model")]
    assert runner() == []


@pytest.mark.parametrize("state", ["suspect", "lost"])
def test_a_silent_member_is_named_long_before_a_stall_and_blamed_by_one(state):
    waits = DeclaredWait(what="environment step", on="env:0", since_seconds=13.0)
    status_board = board(
        [member("env:0", state=state, last_seen=13.0), member("rollout:0", wait=waits)], failurePolicy=SOON
    )
    with status_board.during(Phase.GENERATING):
        status = snapshot(status_board)
        assert status["waits"][0] == {"who": "hub", "on": "env:0", "what": "heartbeat", "seconds": 7.0}
        assert status["waits"][1]["on"] == "env:0" and status["stall"] is None
        assert explain(status_board._waits(status_board._cluster.members()), [])[0] == "WaitingForEnv"


def test_an_env_that_waits_for_its_process_is_blamed_and_the_process_named():
    child = DeclaredWait(what="step of user code", on="env:0/child-1", since_seconds=9.0)
    rollout = DeclaredWait(what="environment step", on="env:0", since_seconds=9.1)
    status_board = board([member("env:0", wait=child), member("rollout:0", wait=rollout)])
    with status_board.during(Phase.GENERATING):
        reason, sentence = explain(status_board._waits(status_board._cluster.members()), [])
    assert reason == "WaitingForEnv" and "env:0 waits for env:0/child-1 (step of user code, 9 s)" in sentence


def test_a_failure_is_counted_and_told_at_the_end():
    status_board = board([])
    status_board.count_failure("rollout", "lost")
    status_board.count_failure("rollout", "lost")
    status_board.end(Phase.FAILED, {"type": "DataError", "message": "bad"})
    status = snapshot(status_board)
    assert status["failures"] == {"actor/restart": 1, "rollout/lost": 2}, "those of earlier epochs stay"
    assert status["failure"]["message"] == "bad"
    assert status["phase"] == "Failed" and status["stall"] is None


def test_totals_sum_over_members_and_count_failures():
    status_board = board([member("env:0"), member("env:1"), member("rollout:0", version=4)])
    status_board.set(policyVersion=5)
    status_board.count_failure("env", "lost")
    failures = {"failures_total/actor/restart": 1.0, "failures_total/env/lost": 1.0}
    own = {"env/steps_total": 6.0, "rollout/engines_lost_total": 1.0}
    assert status_board.totals() == failures | {"weights/lag_max": 1.0} | own, "but not what is no count"


def test_engines_are_told_by_rollout_and_as_one_number_each_and_what_none_of_them_tells_is_absent():
    first, second = member("rollout:0"), member("rollout:1")
    first.metrics = {"rollout/tokens_per_second": 30.0, "rollout/waiting": 2.0, "rollout/kv_use": 0.9}
    second.metrics = {"rollout/tokens_per_second": 12.0, "rollout/waiting": 0.0, "rollout/kv_use": 0.2, "other": 1.0}
    status_board = board([first, second, member("env:0")])
    engines = {name: value for name, value in status_board.totals().items() if name.startswith("rollout/")}
    assert engines == {"rollout/tokens_per_second": 42.0, "rollout/waiting": 2.0, "rollout/kv_use": 0.9}
    generation = {m["name"]: m["generation"] for m in snapshot(status_board)["members"]}
    assert generation["rollout:1"] == {"tokens_per_second": 12.0, "waiting": 0.0, "kv_use": 0.2}
    assert generation["env:0"] == {}


def test_the_last_progress_is_that_of_the_members_too(monkeypatch):
    clock = iter(f"t{number}" for number in range(9))
    monkeypatch.setattr("rl_core.runner.status.now_text", lambda: next(clock))
    worker = member("rollout:0", progress={"tokens": 1})
    status_board = board([worker])
    first = snapshot(status_board)["lastProgress"]
    assert snapshot(status_board)["lastProgress"] == first, "nothing moved"
    worker.progress["tokens"] = 2
    assert snapshot(status_board)["lastProgress"] > first


@pytest.mark.parametrize(("phase", "blamed"), [(Phase.GENERATING, "rollout:1"), (Phase.DEGRADED, "rollout:2")])
def test_a_stall_names_the_rollout_that_waits_for_nobody_and_is_counted_on(monkeypatch, phase, blamed):
    clock = SimpleNamespace(now=0.0)
    idle = DeclaredWait(what="prompts", on="channel:prompts", since_seconds=9.0)
    others = [member("rollout:1")] if phase is Phase.GENERATING else []
    here = [member("actor:0", state="ready"), member("env:0", state="ready"), member("rollout:0", wait=idle), *others]
    leaving = [member("rollout:3", state="draining"), member("rollout:4", state="drained")]
    status_board = board(
        [*here, *leaving, member("rollout:2", state="updating")], rollout={"replicas": 1}, failurePolicy=SOON
    )
    monkeypatch.setattr(status_board._stall, "clock", lambda: clock.now)
    with status_board.during(phase):
        snapshot(status_board)
        clock.now = 1e6
        stall = snapshot(status_board)["stall"]
    assert stall["reason"] == "WaitingForRollout"
    assert [
        name for name in (f"rollout:{rank}" for rank in range(5)) if f"{name} declares none" in stall["message"]
    ] == [blamed]


def test_who_holds_which_group_since_when_is_shown_beside_the_numbers_of_the_ledger():
    held = HeldGroup(group_id="0-7", state=GroupState.LEASED, owner="rollout:1 (0.0)", seconds=12.34, attempt=2)
    taken = HeldGroup(group_id="0-8", state=GroupState.CONSUMED, owner="", seconds=1.0, attempt=1)
    held_groups = [held, taken]
    steps = SimpleNamespace(metrics=lambda: {"ledger/leased": 1.0}, held=lambda: held_groups)
    prompts = Prompts(
        dispatcher=None, steps=steps, workload=Workload(), mover=None, trajectories=None, ledger_file=None, samples=None
    )
    ledger = prompts.status()["ledger"]
    assert ledger["ledger/leased"] == 1.0
    assert ledger["groups"] == [
        {"id": "0-7", "state": "leased", "owner": "rollout:1 (0.0)", "seconds": 12.3, "attempt": 2},
        {"id": "0-8", "state": "consumed", "owner": None, "seconds": 1.0, "attempt": 1},
    ]
    held_groups *= 500
    assert len(prompts.status()["ledger"]["groups"]) == MOST_GROUPS


def test_a_status_asks_once_for_the_wanted_members_however_many_are_lost():
    shown = board([member(f"rollout:{rank}", state="lost") for rank in range(50)], rollout={"replicas": 50})
    asked, wanted = [], shown._roster.wanted
    shown._roster.wanted = lambda role: asked.append(role) or wanted(role)
    shown.snapshot()
    assert sorted(asked) == sorted([*("actor", "rollout", "env")] * 2), "once for the status, once for the missing ones"


def test_a_look_asks_for_the_wanted_names_equally_often_however_many_members_are_lost(monkeypatch):
    calls, wanted = [], Roster.wanted
    monkeypatch.setattr(Roster, "wanted", lambda self, role: (calls.append(role), wanted(self, role))[1])
    counts = []
    for lost in (1, 1000):
        calls.clear()
        snapshot(board([member(f"rollout:{rank}", state="lost") for rank in range(lost)]))
        counts.append(len(calls))
    assert counts[0] == counts[1] <= 6
