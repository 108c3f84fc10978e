"""The pure parts of supervision: exit codes, budgets, probe answers, processes by their marks, shared helpers."""

import os
import subprocess
import sys
import time
from collections import deque

import pytest

from rl_core.api.errors import ConfigError
from rl_core.plan.launch import ContainerPlan, PodPlan, ProcessPlan
from rl_core.workers import processes
from rl_core.workers.budget import RestartBudget
from rl_core.workers.probes import FIRST_SIGN, SILENCE, Probes
from rl_core.workers.supervisor import ExitCode, Supervisor


class FakeChild:
    """Stands in for a started process."""

    def __init__(self, name, *, running=True, state=None, last_alive=None, started=0.0):
        self.name, self.running, self.state, self.last_alive = name, running, state, last_alive
        self.pid, self.tail, self.started = os.getpid(), deque(), started


def process(name, group):
    return ProcessPlan(name=name, group=group, rank=0, command=("true",), env={})


def probes(role, children, now=100.0):
    plans = [process(name, "runner" if name == "runner" else role) for name in children]
    pod = PodPlan(
        name=f"j-{role}-0",
        role=role,
        index=0,
        containers=(ContainerPlan(name=role, image_role=role, processes=tuple(plans)),),
    )
    return Probes(pod, plans, {name: child for name, child in children.items() if child}, {}, clock=lambda: now)


@pytest.mark.parametrize(
    ("child", "pod"),
    [
        (0, 0),
        (2, 2),
        (3, 3),
        (4, 4),
        (137, 137),
        (139, 139),
        (143, 143),
        (192, 192),
        (1, 3),
        (7, 3),
        (127, 3),
        (128, 3),
        (193, 3),
        (255, 3),
    ],
)
def test_a_childs_code_becomes_a_documented_one(child, pod):
    assert ExitCode.of(child) == pod


def test_a_pod_without_processes_is_refused():
    empty = PodPlan(name="j-env-0", role="env", index=0, containers=())
    with pytest.raises(ConfigError, match="j-env-0 must have processes"):
        Supervisor(empty)


def test_a_budget_allows_three_in_ten_minutes_and_again_when_they_are_old():
    now = [0.0]
    budget = RestartBudget(3, 600, clock=lambda: now[0])
    pauses = []
    for at in (0, 10, 20):
        now[0] = at
        assert budget.take()
        pauses.append(budget.pause)
    assert pauses == [0.0, 1.0, 2.0]
    now[0] = 599
    assert not budget.take()
    now[0] = 601
    assert budget.take() and not budget.take()


@pytest.mark.parametrize(
    ("last_alive", "code"),
    [(None, 200), (100.0 - SILENCE + 1, 200), (100.0 - SILENCE - 1, 503)],
    ids=["never told", "recent", "silent"],
)
def test_healthz_judges_by_the_last_sign_of_life(last_alive, code):
    found, text = probes("env", {"env-0": FakeChild("env-0", last_alive=last_alive)}).healthz()
    assert found == code and (code == 200 or "env-0 for 61 s" in text)


@pytest.mark.parametrize("role", ["env", "runner"])
@pytest.mark.parametrize("waited", [FIRST_SIGN - 1, FIRST_SIGN + 1])
def test_a_worker_that_never_gives_a_sign_is_given_up_in_the_end(role, waited):
    child = FakeChild(name := "runner" if role == "runner" else "env-0", started=5.0)
    found, text = probes("actor" if role == "runner" else role, {name: child}, now=5.0 + waited).healthz()
    late = waited > FIRST_SIGN and role != "runner"
    assert found == (503 if late else 200) and ("env-0 for 601 s" in text) == late


def test_healthz_does_not_judge_the_ended():
    assert probes("env", {"env-0": FakeChild("env-0", running=False, last_alive=0.0)}).healthz()[0] == 200


@pytest.mark.parametrize(
    ("role", "state", "code"),
    [
        ("env", None, 503),
        ("env", "ready", 200),
        ("env", "draining", 503),
        ("actor", "joining", 200),
        ("rollout", "ready", 503),
        ("rollout", "updating", 503),
        ("rollout", "serving", 200),
    ],
)
def test_readyz_wants_registered_children_and_serving_rollouts(role, state, code):
    assert probes(role, {f"{role}-0": FakeChild(f"{role}-0", state=state)}).readyz()[0] == code


def test_readyz_names_who_is_not_there():
    code, text = probes("actor", {"runner": FakeChild("runner"), "actor-0": None}).readyz()
    assert (code, text) == (503, "waiting for actor-0: not running\n")


def test_metrics_are_lines_that_prometheus_reads():
    from prometheus_client.parser import text_string_to_metric_families

    text = probes("env", {"env-0": FakeChild("env-0"), "env-1": FakeChild("env-1", running=False)}).metrics()[1]
    samples = {
        (s.name, s.labels["process"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples["rljob_process_up", "env-0"] == 1 and samples["rljob_process_up", "env-1"] == 0
    assert samples["rljob_process_resident_memory_bytes", "env-0"] > 1e6


def test_marked_finds_descendants_in_sessions_of_their_own_by_all_marks():
    marker = f"RLJOB_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = marker.partition("=")
    code = (
        "import subprocess, sys; say = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)';"
        "subprocess.Popen([sys.executable, '-c', say], start_new_session=True); sys.stdin.read()"
    )  # it says its own number: a program that is just being started has no environment yet
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, name: value, "OTHER": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stray = int(parent.stdout.readline())
    try:
        assert sorted(processes.with_environment(marker)) == sorted([parent.pid, stray])
        assert sorted(processes.with_environment(marker, "OTHER=1")) == sorted([parent.pid, stray])
        assert list(processes.with_environment(marker, "OTHER=2")) == []
        assert parent.pid in processes.children()
    finally:
        os.kill(stray, 9)
        parent.communicate()


def test_what_is_gone_is_told_and_not_raised():
    child = subprocess.Popen(["true"], process_group=0)
    child.wait()
    assert processes.reap(child.pid) is None
    assert not processes.kill(child.pid, 0) and not processes.kill_group(child.pid, 0)
    assert processes.memory_bytes(child.pid) == 0
