"""Bad input and user code that misbehaves: a clear error or a counted drop, never a hang or a bare traceback."""

import textwrap
from collections import Counter

import pytest

from rl_core.launch.workspace import Workspace
from rl_core.samples.lines import TRAIN
from rl_core.samples.reader import SampleReader
from tests.e2e.harness import Run, job_document


def write(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"algorithm": {"groupSize": 1}}, ["groupSize must be at least 2", "got 1"]),
        ({"algorithm": {"promptsPerStep": 3}, "actor": {"replicas": 2}}, ["promptsPerStep", "data-parallel size 2"]),
        ({"rollout": {"minReplicas": 5}}, ["minReplicas must not exceed replicas 1"]),
        ({"model": {"path": "/nowhere"}}, ["spec.model.path", "/nowhere"]),
        ({"data": {"train": "/nowhere.jsonl"}}, ["data.train: must be an existing file"]),
        ({"env": {"type": "reward", "reward": "reward:absent"}}, ["reward:absent"]),
        ({"env": {"type": "reward", "reward": "no_such_module:f"}}, ["no_such_module"]),
        ({"env": {"type": "mathh"}}, ["mathh", "math"]),
        ({"env": {"type": "math", "reward": None, "options": {"comparatr": "exact"}}}, ["comparatr"]),
        ({"rollout": {"maxSequenceLength": 4096}}, ["max_position_embeddings 64"]),
    ],
)  # fmt: skip
def test_a_wrong_job_is_refused_before_anything_starts(tmp_path, tiny, spec, words):
    run = Run(tmp_path, job_document(tiny, **spec), python_path=tiny)
    assert run.run() == 2, run.text
    assert all(word in run.text for word in words), run.text
    assert "Traceback" not in run.text and not (run.output / "processes.json").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "at least one row"), ('{"prompt": "a"}\n{oops\n', "train.jsonl:2")],
    ids=["empty", "malformed"],
)
def test_unusable_data_is_refused_with_its_line(tmp_path, tiny, content, words):
    path = write(tmp_path, "train.jsonl", content)
    run = Run(tmp_path / "run", job_document(tiny, data={"train": str(path)}), python_path=tiny)
    assert run.run() == 2 and words in run.text, run.text


MISBEHAVING = {
    "raises": ("raise KeyError('no such column')", "no such column"),
    "sleeps for ever": ("import time; time.sleep(3600)", "deadline"),
    "exits": ("import os; os._exit(7)", "reward"),
}


@pytest.mark.parametrize("kind", MISBEHAVING)
def test_a_reward_function_that_misbehaves_ends_the_run_naming_it_and_yields_no_zero(tmp_path, tiny, kind):
    body, words = MISBEHAVING[kind]
    # `rljob run` tries the function before it starts anything, without an output folder in the environment.
    guard = "if 'RLJOB_OUTPUT' not in environ: return [1.0] * len(completions)"
    code = f"from os import environ\n\ndef f(prompts, completions, **columns):\n    {guard}\n    {body}\n"
    write(tmp_path, "user_reward.py", code)
    spec = {
        "env": {"type": "reward", "reward": "user_reward:f"},
        "validation": {"beforeTraining": False},
        "runtime": {"deadlines": {"envStep": 2.0}} if kind == "sleeps for ever" else {},
    }
    run = Run(tmp_path / "run", job_document(tiny, **spec), python_path=tmp_path)
    code = run.run()
    assert code in (3, 4), run.text + run.logs()
    assert words.lower() in run.text.lower() and "maxDroppedGroups" in run.text, run.text
    assert run.lines("ledger.jsonl") == [] and run.status()["phase"] == "Failed"
    assert "(train.jsonl row " in run.text
    if kind == "raises":
        reader = SampleReader(run.output)
        reader.refresh()
        errors = [reader.read(found)["error"] for found in reader.every(TRAIN)]
        assert errors and all("no such column" in error for error in errors)


def test_a_reward_function_that_misbehaves_at_once_is_refused_before_anything_starts(tmp_path, tiny):
    write(tmp_path, "user_reward.py", "def f(prompts, completions, solution):\n    return solution\n")
    run = Run(tmp_path / "run", job_document(tiny, env={"reward": "user_reward:f"}), python_path=tmp_path)
    assert run.run() == 2, run.text
    assert "spec.env.reward: called with data.train row 1: reward user_reward:f needs the column 'solution'" in run.text
    assert not run.output.exists()


def test_an_estimator_that_fails_in_training_ends_the_run_at_once_as_bad_input(tmp_path, tiny):
    code = """
    import os
    from rl_core.algorithms import AdvantageResult

    def f(inputs):
        if "RLJOB_OUTPUT" in os.environ:
            inputs.reward
        return AdvantageResult(inputs.rewards[:, None] * inputs.mask)
    """
    write(tmp_path, "mine.py", textwrap.dedent(code))
    write(tmp_path, "reward.py", (tiny / "reward.py").read_text())
    spec = {"algorithm": {"name": "mine:f"}, "validation": {"beforeTraining": False}}
    run = Run(tmp_path / "run", job_document(tiny, **spec), python_path=tmp_path)
    assert run.run() == 2, run.text + run.logs()
    assert "(mine.py:7 in f); correct it" in run.text and run.status()["restarts"] == 0, run.text


def test_bad_samples_within_the_budget_are_dropped_counted_and_replaced(tmp_path, tiny):
    write(
        tmp_path,
        "user_reward.py",
        "def f(prompts, completions, **columns):\n    assert not any('003' in prompt for prompt in prompts)\n    return [float(len(c)) for c in completions]\n",
    )
    spec = {
        "env": {"type": "reward", "reward": "user_reward:f"},
        "algorithm": {"promptsPerStep": 4, "groupSize": 4, "steps": 4, "maxDroppedGroups": 5},
        "data": {"train": str(tiny / "data/train.jsonl"), "validation": None, "shuffle": False},
    }
    run = Run(tmp_path / "run", job_document(tiny, **spec), python_path=tmp_path)
    assert run.run() == 0, run.text + run.logs()
    assert 3 not in {line["prompt_index"] for line in run.lines("ledger.jsonl")}
    assert run.lines("metrics.jsonl")[-1]["ledger/dropped"] == 1
    reader = SampleReader(run.output)
    reader.refresh()
    (failed,) = [found for found in reader.every(TRAIN) if found.entry.reason == "error"]
    sample = reader.read(failed)
    assert (
        sample["group"] == "0-3" and "AssertionError" in sample["error"] and "003" in sample["messages"][0]["content"]
    )


def test_groups_that_dynamic_sampling_discards_are_kept_with_the_reason_though_no_step_was_trained(tmp_path, tiny):
    write(tmp_path, "user_reward.py", "def f(prompts, completions, **columns):\n    return [0.5] * len(completions)\n")
    spec = {
        "env": {"type": "reward", "reward": "user_reward:f"},
        "algorithm": {"dynamicSampling": {"enabled": True}, "maxGenerationBatches": 2},
        "samples": {"groups": 3},
        "validation": {"beforeTraining": False},
    }
    run = Run(tmp_path / "run", job_document(tiny, **spec), python_path=tmp_path)
    assert run.run() == 4, run.text + run.logs()
    assert "between 0.5 and 0.5" in run.text, run.text
    reader = SampleReader(run.output)
    reader.refresh()
    found = [reader.read(one) for one in reader.every(TRAIN)]
    assert [sample["index"] for sample in found] == [0, 1, 2, 3] * 3 and {sample["step"] for sample in found} == {1}
    assert {sample["filtered"] for sample in found} == {
        "algorithm.dynamicSampling needs rewards that differ, got 4 times 0.5"
    }
    assert all(sample["reward"] == 0.5 and sample["response_tokens"] and sample["engine"] for sample in found)


def test_a_dropped_group_may_shrink_its_step_to_a_multiple_of_the_data_ranks(tmp_path, tiny):
    body = "def f(prompts, completions, **columns):\n    assert not any('003' in prompt for prompt in prompts)\n"
    write(tmp_path, "user_reward.py", f"{body}    return [float(len(c)) for c in completions]\n")
    spec = {
        "env": {"type": "reward", "reward": "user_reward:f"},
        "algorithm": {"steps": 3, "maxDroppedGroups": 5, "onDrop": "shrink", "minBatchFraction": 0.5},
        "actor": {"processesPerPod": 2},
        "data": {"train": str(tiny / "data/train.jsonl"), "validation": None, "shuffle": False},
        "runtime": {"deadlines": {"rollout": 60}},
    }
    run = Run(tmp_path / "run", job_document(tiny, **spec), python_path=tmp_path)
    assert run.run() == 0, run.text + run.logs()
    ledger = run.lines("ledger.jsonl")
    trained = Counter(line["step"] for line in ledger)
    assert trained[1] in {2, 4} and (trained[2], trained[3]) == (
        4,
        4,
    )  # replaced where more than two were there already
    assert len({line["group_id"] for line in ledger}) == len(ledger)
    assert run.lines("metrics.jsonl")[-1]["ledger/dropped"] == 1


def test_a_folder_that_a_live_run_uses_is_refused_and_left_as_it_is(tmp_path, tiny):
    run = Run(tmp_path, job_document(tiny), "--resume", "auto", python_path=tiny)
    other = Workspace(run.output)
    other.open(uid="the-live-run", job=None)
    write(run.output, "job.yaml", "the live run's")
    before = {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()}
    assert run.run() == 2 and "in use by another run" in run.text, run.text
    other.close()
    assert {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()} == before
