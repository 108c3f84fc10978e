"""When `wait` has returned no process of the run is left: what is killed and slow to go is waited for."""

import pytest

from rl_core.launch.local_pods import LAST_SWEEP_SECONDS, POD_SWEEP_SECONDS, LocalPods
from rl_core.launch.workspace import Workspace
from rl_core.workers import processes


class Strays:
    """Stands in for the kernel: processes that go `seconds` after they were first killed; the time is its own."""

    def __init__(self, seconds):
        self.now, self.seconds, self.killed, self.marks = 0.0, seconds, None, ()

    def marked(self, *marks):
        self.marks = marks
        return [7] if self.killed is None or self.now < self.killed + self.seconds else []

    def kill(self, pid, signum):
        self.killed = self.now if self.killed is None else self.killed

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("takes", "seconds", "told"),
    [
        (5.0, LAST_SWEEP_SECONDS, False),
        (LAST_SWEEP_SECONDS * 2, LAST_SWEEP_SECONDS, True),
        (5.0, POD_SWEEP_SECONDS, True),
    ],
    ids=["slow at the end", "too slow at the end", "slow between"],
)
def test_killed_strays_are_waited_for_and_told_when_they_stay(tmp_path, monkeypatch, caplog, takes, seconds, told):
    strays = Strays(takes)
    for name, value in (("with_environment", strays.marked), ("kill", strays.kill), ("time", strays)):
        monkeypatch.setattr(processes, name, value)
    pods = LocalPods(Workspace(tmp_path), environ={}, on_end=lambda pod: None)
    pods.sweep("j-rollout-0", seconds=seconds)
    assert "RLJOB_POD=j-rollout-0" in strays.marks
    assert bool(strays.marked()) == told == ("processes [7] with" in caplog.text)
    assert min(takes, seconds) <= strays.now < seconds + 1
