"""Groups of this repository in real runs: a member is killed in the middle of a call, and the run goes on."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import assert_trained_once
from tests.small_models import save_classifier, save_policy

HELD = """
import os, pathlib, signal
from collections import Counter

FOLDER = pathlib.Path(__file__).parent
CALLS = Counter()


def held(group):
    CALLS[group] += 1
    if CALLS[group] == 2 and not (FOLDER / f"go-{group}").exists():
        (FOLDER / f"held-{group}").write_text(str(os.getpid()))
        while not (FOLDER / f"go-{group}").exists():
            yield


class EndsInFormation:
    def __init__(self, config):
        if (FOLDER / "forming").exists() and not (formed := FOLDER / f"formed-{self.group_name}").exists():
            formed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(config)
"""

WORKER = """
import time
from held import EndsInFormation, held
from rl_core.groups.{module} import {base}


class Held(EndsInFormation, {base}):
    def {method}(self, *arguments, **named):
        for _ in held("{group}"):
            time.sleep(0.05)
        return super().{method}(*arguments, **named)
"""

INFERENCE_WORKER = """
import asyncio
from held import EndsInFormation, held
from rl_core.groups.inference import Inference


class Held(EndsInFormation, Inference):
    async def log_probs(self, *arguments):
        for _ in held("inference"):
            await asyncio.sleep(0.05)
        return await super().log_probs(*arguments)
"""

REWARD = """
from rl_core.envs.member_calls import call_member


def letters(answer):
    return sum(map(str.isalpha, answer)) or None


def judged(prompts, completions, messages, **columns):
    verdicts = call_member("judge", "score", messages)
    return [score + verdict for score, verdict in zip(call_member("reward-model", "score", messages), verdicts)]
"""

CODE = {
    "held.py": HELD,
    "held_reward_model.py": WORKER.format(
        group="reward-model", module="reward_model", base="RewardModel", method="score"
    ),
    "held_judge.py": WORKER.format(group="judge", module="judge", base="Judge", method="score"),
    "held_teacher.py": WORKER.format(group="teacher", module="teacher", base="Teacher", method="top_log_probs"),
    "held_critic.py": WORKER.format(group="critic", module="critic", base="Critic", method="values"),
    "held_inference.py": INFERENCE_WORKER,
    "scores.py": REWARD,
}
"""Modules of the job. Each worker has one of its own, so that no process imports the libraries of another."""


def write_code(run) -> None:
    for name, text in CODE.items():
        (run.job.parent / name).write_text(text)


INFERENCE = {"name": "inference", "worker": "held_inference:Held", "weights": "pulls"}
SHORT = {"validation": {"beforeTraining": False}}


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def judging(folder: Path) -> dict:
    """Return the fields of a job whose reward function asks a judge and a reward model."""
    model = {
        "name": "reward-model",
        "worker": "held_reward_model:Held",
        "callers": ["env"],
        "config": {"modelPath": str(save_classifier(folder / "classifier"))},
    }
    options = {
        "modelPath": str(save_policy(folder / "judge")),
        "template": "{{ completion }}=",
        "parser": "scores:letters",
    }
    judge = {
        "name": "judge",
        "worker": "held_judge:Held",
        "callers": ["env"],
        "config": {**options, "maxNewTokens": 12, "maximum": 12},
    }
    return {"groups": [model, judge], "env": {"reward": "scores:judged"}}


def test_a_reward_function_that_asks_two_groups_scores_although_a_member_of_each_is_killed_in_a_call(start, tmp_path):
    run = start(**judging(tmp_path), algorithm={"steps": 3}, **SHORT)
    assert "judge/answers_total" in run_with_kills(run, "judge", "reward-model")[-1]


def run_with_kills(run, *groups: str) -> list[dict]:
    """Run the job of three steps, kill the member of each of `groups` when it holds a call, and return the metrics of the steps."""
    write_code(run)
    run.start()
    for group in groups:
        pid = int(run.until(lambda group=group: read(run.job.parent / f"held-{group}"), f"a call that {group} holds"))
        assert [line["step"] for line in run.lines("metrics.jsonl")] in ([], [1]), "the step waits for the call"
        os.kill(pid, signal.SIGKILL)
        (run.job.parent / f"go-{group}").touch()
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=3, groups=4)
    lines = run.lines("metrics.jsonl")
    assert [lines[-1][f"failures_total/{group}/lost"] for group in groups] == [1] * len(groups)
    assert lines[-1]["epoch"] == 0 and run.processes() == []
    return lines


def test_a_member_of_each_kind_of_group_that_is_killed_while_it_is_constructed_is_named_and_replaced(start, tmp_path):
    spec = distilling(save_policy(tmp_path / "teacher", seed=3), "held_teacher:Held", steps=1, topK=4, rewardWeight=1.0)
    spec["algorithm"] |= {"recomputeLogProbs": True, "inference": "inference"}
    spec = judging(tmp_path) | spec | {"groups": [*spec["groups"], *judging(tmp_path)["groups"], INFERENCE]}
    run = start(**spec)
    write_code(run)
    names = ["teacher", "reward-model", "judge", "inference"]
    for name in ["forming", *(f"go-{name}" for name in names)]:
        (run.job.parent / name).touch()
    assert run.run() == 0, run.text + run.logs()
    assert_trained_once(run, steps=1, groups=4)
    (line,) = run.lines("metrics.jsonl")
    assert line["epoch"] == 0 and 0.0 < line["train/distill/teacher_share"] < 1.0
    for name in names:
        assert (run.job.parent / f"formed-{name}").exists()
        assert f"{name}-0 ended by signal SIGKILL (code 137): started again" in run.text, run.text
        assert f"{name}:0 is lost: its process ended with code 137" in read(run.output / "logs/actor-0.log")
    assert run.processes() == []


def distilling(folder: Path, worker: str, *, steps: int = 6, **distillation) -> dict:
    group = {"name": "teacher", "worker": worker, "callers": ["actor"], "config": {"modelPath": str(folder)}}
    return {
        "groups": [group],
        "algorithm": {"name": "distill", "distillation": {"teacher": "teacher", **distillation}, "steps": steps},
        "actor": {"optimizer": {"learningRate": 1.0e-3, "weightDecay": 0.0}},
        **SHORT,
    }


def test_a_step_waits_for_the_successor_of_a_teacher_that_is_killed_in_a_call(start, tmp_path):
    folder = save_policy(tmp_path / "teacher", seed=3)
    lines = run_with_kills(start(**distilling(folder, "held_teacher:Held", steps=3, topK=4)), "teacher")
    assert all(line["train/distill/teacher_share"] == 1.0 and line["train/distill/top_k_kl"] > 0 for line in lines)


def test_old_log_probabilities_come_from_a_group_with_the_trainers_weights_also_after_a_member_was_killed(start):
    algorithm = {"steps": 3, "recomputeLogProbs": True, "inference": "inference"}
    # With one optimizer step per batch the trained policy is the old one: any other weights or tokens would show in the KL.
    run = start(groups=[INFERENCE], algorithm=algorithm, actor={"optimizer": {"learningRate": 1.0e-2}}, **SHORT)
    lines = run_with_kills(run, "inference")
    assert all(abs(line["train/approx_kl"]) < 1e-5 for line in lines), lines
    assert [line["weights/version"] for line in lines] == [1.0, 2.0, 3.0]
    assert "computes the old log-probabilities of this step itself" not in run.logs()


def test_a_run_whose_teacher_says_what_the_student_says_ends_after_three_steps(start, tiny):
    run = start(**distilling(tiny / "model", "rl_core.groups.teacher:Teacher"))
    assert run.run() == 2, run.text + run.logs()
    assert "train/distill/teacher_share must be above 0, got 0 for 3 steps" in run.text
    assert len(run.lines("ledger.jsonl")) == 12 and run.status()["phase"] == "Failed"


CRITIC = {
    "groups": [{"name": "critic", "worker": "held_critic:Held", "lifecycle": "gang", "callers": ["actor"]}],
    "algorithm": {"name": "gae", "critic": {"group": "critic"}, "steps": 3},
    "checkpoint": {"everySteps": 1},
    **SHORT,
}


def test_a_critic_killed_goes_on_from_the_checkpoint_of_the_actors(start):
    """What it had learned is that of the same step as the policy's: the value loss goes on as in a run that nobody disturbs."""
    undisturbed = start(folder="undisturbed", **CRITIC)
    write_code(undisturbed)
    (undisturbed.job.parent / "go-critic").touch()
    assert undisturbed.run() == 0, undisturbed.text + undisturbed.logs()
    expected = undisturbed.lines("metrics.jsonl")
    for when, epochs in (("in a call", [0, 1, 1]), ("in formation", [1, 1, 1])):
        run = start(folder=when, **CRITIC)
        write_code(run)
        if when == "in formation":
            (run.job.parent / "forming").touch()
            (run.job.parent / "go-critic").touch()
        run.start()
        if when == "in a call":
            pid = int(run.until(lambda run=run: read(run.job.parent / "held-critic"), "a call that is held"))
            (run.job.parent / "go-critic").touch()
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == 0, when + run.text + run.logs()
        assert_trained_once(run, steps=3, groups=4)
        lines = run.lines("metrics.jsonl")
        assert [line["epoch"] for line in lines] == epochs, when
        assert "critic" in run.text and run.processes() == []
        for line, other in zip(lines, expected, strict=True):
            assert line["train/value_loss"] == pytest.approx(other["train/value_loss"], rel=1e-3), when
            assert line["train/critic_grad_norm"] > 0 and line["time/critic"] > 0
