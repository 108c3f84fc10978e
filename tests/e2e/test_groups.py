"""Groups of this repository in real runs: a member is killed in the middle of a call, and the run goes on."""

import os
import signal
from pathlib import Path

import pytest

from tests.small_models import save_classifier

CODE = """
import os, pathlib, time

from rl_core.envs.member_calls import call_member
from rl_core.groups.reward_model import RewardModel

FOLDER = pathlib.Path(__file__).parent


class Held(RewardModel):
    calls = 0

    def score(self, rows):
        Held.calls += 1
        if Held.calls == 2 and not (FOLDER / "go").exists():
            (FOLDER / "held").write_text(str(os.getpid()))
            while not (FOLDER / "go").exists():
                time.sleep(0.05)
        return super().score(rows)


def with_bonus(prompts, completions, messages, **columns):
    return [score + 1.0 for score in call_member("reward-model", "score", messages)]
"""


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"type": "reward_model", "reward": None, "options": {"group": "reward-model"}}, id="env.type"),
        pytest.param({"type": "reward", "reward": "own:with_bonus"}, id="reward function"),
    ],
)
def test_completions_are_scored_although_the_reward_model_is_killed_in_a_call(start, env, tmp_path):
    folder = save_classifier(tmp_path / "classifier")
    group = {
        "name": "reward-model",
        "worker": "own:Held",
        "callers": ["env"],
        "config": {"modelPath": str(folder)},
    }
    run = start(
        groups=[group], env=env, rollout={"replicas": 1}, algorithm={"steps": 3}, validation={"beforeTraining": False}
    )
    (run.job.parent / "own.py").write_text(CODE)
    run.start()
    pid = int(run.until(lambda: read(run.job.parent / "held"), "a call that is held"))
    os.kill(pid, signal.SIGKILL)
    (run.job.parent / "go").touch()
    assert run.wait() == 0, run.text + run.logs()
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["failures_total/reward-model/lost"] == 1 and lines[-1]["epoch"] == 0
    trained = [line["group_id"] for line in run.lines("ledger.jsonl")]
    assert len(trained) == len(set(trained)) == 12
