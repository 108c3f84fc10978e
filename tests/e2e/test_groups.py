"""Groups of this repository in real runs: a member is killed in the middle of a call, and the run goes on."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import assert_trained_once
from tests.small_models import save_classifier, save_policy

CODE = """
import asyncio, os, pathlib, time

from rl_core.envs.member_calls import call_member
from rl_core.groups.critic import Critic
from rl_core.groups.inference import Inference
from rl_core.groups.reward_model import RewardModel
from rl_core.groups.teacher import Teacher

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


class HeldTeacher(Teacher):
    calls = 0

    def top_log_probs(self, rows, temperature, top_k):
        HeldTeacher.calls += 1
        if HeldTeacher.calls == 2 and not (FOLDER / "go").exists():
            (FOLDER / "held").write_text(str(os.getpid()))
            while not (FOLDER / "go").exists():
                time.sleep(0.05)
        return super().top_log_probs(rows, temperature, top_k)


class HeldInference(Inference):
    calls = 0

    async def log_probs(self, *asked):
        HeldInference.calls += 1
        if HeldInference.calls == 2 and not (FOLDER / "go").exists():
            (FOLDER / "held").write_text(str(os.getpid()))
            while not (FOLDER / "go").exists():
                await asyncio.sleep(0.05)
        return await super().log_probs(*asked)


class HeldCritic(Critic):
    def values(self, rows, version):
        if version == 1 and not (FOLDER / "go").exists():
            (FOLDER / "held").write_text(str(os.getpid()))
            while not (FOLDER / "go").exists():
                time.sleep(0.05)
        return super().values(rows, version)


def letters(answer):
    return sum(map(str.isalpha, answer)) or None


def judged(prompts, completions, messages, **columns):
    verdicts = call_member("judge", "score", messages)
    return [score + verdict for score, verdict in zip(call_member("reward-model", "score", messages), verdicts)]
"""


SHORT = {"validation": {"beforeTraining": False}}


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_reward_function_that_asks_two_groups_scores_although_one_is_killed_in_a_call(start, tmp_path):
    folder = save_classifier(tmp_path / "classifier")
    group = {
        "name": "reward-model",
        "worker": "own:Held",
        "callers": ["env"],
        "config": {"modelPath": str(folder)},
    }
    options = {
        "modelPath": str(save_policy(tmp_path / "judge")),
        "template": "{{ completion }}=",
        "parser": "own:letters",
    }
    judge = {
        "name": "judge",
        "worker": "rl_core.groups.judge:Judge",
        "callers": ["env"],
        "config": {**options, "maxNewTokens": 12, "maximum": 12},
    }
    run = start(groups=[group, judge], env={"reward": "own:judged"}, algorithm={"steps": 3}, **SHORT)
    assert "judge/answers_total" in run_with_a_kill(run, "reward-model")[-1]


def run_with_a_kill(run, group: str) -> list[dict]:
    """Run the job of three steps, kill the member of `group` that holds a call, and return the metrics of the steps."""
    (run.job.parent / "own.py").write_text(CODE)
    run.start()
    pid = int(run.until(lambda: read(run.job.parent / "held"), "a call that is held"))
    assert [line["step"] for line in run.lines("metrics.jsonl")] in ([], [1]), "the step waits for the call"
    os.kill(pid, signal.SIGKILL)
    (run.job.parent / "go").touch()
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=3, groups=4)
    lines = run.lines("metrics.jsonl")
    assert lines[-1][f"failures_total/{group}/lost"] == 1 and lines[-1]["epoch"] == 0
    return lines


def distilling(folder: Path, worker: str, *, top_k: int | None = None, **algorithm) -> dict:
    group = {"name": "teacher", "worker": worker, "callers": ["actor"], "config": {"modelPath": str(folder)}}
    return {
        "groups": [group],
        "algorithm": {"name": "distill", "distillation": {"teacher": "teacher", "topK": top_k}, **algorithm},
        "actor": {"optimizer": {"learningRate": 1.0e-3, "weightDecay": 0.0}},
        **SHORT,
    }


def test_a_step_waits_for_the_successor_of_a_teacher_that_is_killed_in_a_call(start, tmp_path):
    folder = save_policy(tmp_path / "teacher", seed=3)
    lines = run_with_a_kill(start(**distilling(folder, "own:HeldTeacher", top_k=4, steps=3)), "teacher")
    assert all(line["train/distill/teacher_share"] == 1.0 and line["train/distill/top_k_kl"] > 0 for line in lines)


def test_old_log_probabilities_come_from_a_group_with_the_trainers_weights_also_after_a_member_was_killed(start):
    group = {"name": "inference", "worker": "own:HeldInference", "weights": "pulls"}
    algorithm = {"steps": 3, "recomputeLogProbs": True, "inference": "inference"}
    # With one optimizer step per batch the trained policy is the old one: any other weights or tokens would show in the KL.
    run = start(groups=[group], algorithm=algorithm, actor={"optimizer": {"learningRate": 1.0e-2}}, **SHORT)
    lines = run_with_a_kill(run, "inference")
    assert all(abs(line["train/approx_kl"]) < 1e-5 for line in lines), lines
    assert [line["weights/version"] for line in lines] == [1.0, 2.0, 3.0]
    assert "computes the old log-probabilities of this step itself" not in run.logs()


def test_a_run_whose_teacher_says_what_the_student_says_ends_after_three_steps(start, tiny):
    run = start(**distilling(tiny / "model", "rl_core.groups.teacher:Teacher"))
    assert run.run() == 2, run.text + run.logs()
    assert "train/distill/teacher_share must be above 0, got 0 for 3 steps" in run.text
    assert len(run.lines("ledger.jsonl")) == 12 and run.status()["phase"] == "Failed"


CRITIC = {
    "groups": [{"name": "critic", "worker": "own:HeldCritic", "lifecycle": "gang", "callers": ["actor"]}],
    "algorithm": {"name": "gae", "critic": {"group": "critic"}, "steps": 3},
    "checkpoint": {"everySteps": 1},
    **SHORT,
}


def test_a_critic_killed_in_a_call_goes_on_from_the_checkpoint_of_the_actors(start):
    """What it had learned is that of the same step as the policy's: the value loss goes on as in a run that nobody disturbs."""
    undisturbed = start(folder="undisturbed", **CRITIC)
    run = start(**CRITIC)
    for one in (undisturbed, run):
        (one.job.parent / "own.py").write_text(CODE)
    (undisturbed.job.parent / "go").touch()
    assert undisturbed.run() == 0, undisturbed.text + undisturbed.logs()
    run.start()
    pid = int(run.until(lambda: read(run.job.parent / "held"), "a call that is held"))
    (run.job.parent / "go").touch()
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=3, groups=4)
    lines, expected = run.lines("metrics.jsonl"), undisturbed.lines("metrics.jsonl")
    assert [line["epoch"] for line in lines] == [0, 1, 1]
    for line, other in zip(lines, expected, strict=True):
        assert line["train/value_loss"] == pytest.approx(other["train/value_loss"], rel=1e-3)
        assert line["train/critic_grad_norm"] > 0 and line["time/critic"] > 0
