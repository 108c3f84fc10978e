"""`rljob run` from start to end on real processes."""

import json
import os
import signal
import time
from itertools import pairwise

import psutil
import yaml
from safetensors import safe_open

from rl_core import RLJob, start_run
from rl_core.cli.init import init
from rl_core.samples.lines import TRAIN, VALIDATION, array_of
from rl_core.samples.reader import SampleReader
from tests.e2e.harness import assert_nothing_left, assert_trained_once


def test_a_run_trains_validates_checkpoints_exports_and_leaves_nothing_behind(start):
    run = start(algorithm={"steps": 4}, rollout={"replicas": 2, "oversample": 1.5}, trackers=[{"name": "tensorboard"}])
    run.start()
    run.at_step(1)
    pids = [entry["pid"] for entry in run.processes()]
    roles = {(entry["role"], entry["index"]) for entry in run.processes()}
    assert {("runner", 0), ("channel", 0), ("actor", 0), ("rollout", 0), ("rollout", 1), ("env", 0)} <= roles
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=4, groups=4)
    assert_nothing_left(run, pids)
    metrics = run.lines("metrics.jsonl")
    cancelled = [line["rollout/cancelled_groups"] for line in metrics[1:]]
    assert sum(cancelled) > 0 and max(cancelled) <= 2, "six groups are out, four train"
    wanted = {
        "step", "policy_version", "epoch", "reward/mean", "train/policy_loss", "train/grad_norm", "train/staleness_max",
        "time/step", "time/rollout", "time/train", "time/sync", "perf/tokens_per_second", "perf/padding_waste", "perf/dp_imbalance",
        "rollout/starved_seconds", "actor/starved_seconds", "rollout/queue_depth", "actor/queue_depth",
    }  # fmt: skip
    of_the_runner = {"actor/starved_seconds", "actor/queue_depth"}  # the actors' own are train/*
    assert wanted <= set(metrics[-1]) and {name for name in metrics[-1] if name.startswith("actor/")} == of_the_runner
    assert "val/accuracy" in metrics[0] and "val/accuracy" in metrics[-1]
    assert [line["policy_version"] for line in metrics] == [0, 1, 2, 3, 4]
    assert (run.output / "checkpoints/step-00000004/manifest.json").is_file()
    assert (run.output / "model/model.safetensors").is_file() and (run.output / "model/tokenizer.json").is_file()
    assert run.status()["phase"] == "Finished" and run.status()["step"] == 4
    step = metrics[-1]  # generation and training take turns, so each side waits for a part of the step
    assert (
        0 < step["actor/starved_seconds"] < step["time/step"]
        and 0 < step["rollout/starved_seconds"] < step["time/step"]
    )
    assert (run.output / "job.yaml").is_file() and list((run.output / "tensorboard").glob("events*"))
    assert {"actor-0.log", "rollout-0.log", "rollout-1.log", "env-0.log"} <= {
        p.name for p in (run.output / "logs").iterdir()
    }
    assert not list((run.output / "checkpoints").glob(".step*"))
    assert f"look at it: rljob view {run.output}" in run.text
    assert_traced(run, metrics[-1])
    assert_kept(run)


def assert_kept(run):
    """Samples of every step are kept, and their log-probabilities are those of transformers on the model that they name."""
    import torch
    from transformers import AutoModelForCausalLM

    reader = SampleReader(run.output)
    reader.refresh()
    assert reader.steps(TRAIN) == [1, 2, 3, 4] and reader.steps(VALIDATION)[-1] == 4
    start = json.loads((run.output / ".rljob/job.json").read_text())["spec"]["model"]["path"]
    cases = [(start, TRAIN, 1, ("engine", "trainer")), (run.output / "model", VALIDATION, 4, ("engine",))]
    for folder, split, step, names in cases:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for sample in map(reader.read, reader.of_step(split, step)):
            ids = torch.tensor(array_of(sample, "ids").astype("int64"))[None]
            with torch.no_grad():
                expected = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
            generated = array_of(sample, "mask")[1:] > 0
            for name in names:
                assert abs(array_of(sample, name)[1:] - expected)[generated].max() < 1e-5, (split, name)


def assert_traced(run, last):
    """Each trained sample has its whole way in the trace, in order and without a gap, and the loop's parts lie on a row of their own."""
    (file,) = (run.output / "traces").glob("*.json")
    events = json.loads(file.read_text().rstrip().removesuffix(",") + "]")
    spans = [event for event in events if event["ph"] == "X"]
    unknown = whole = 0
    for line in run.lines("ledger.jsonl"):
        (group,) = [  # a group that was cancelled may have come, and been refused, before it was made again
            one
            for one in spans
            if one["name"] == line["group_id"] and one["args"]["step"] == line["step"] and one["args"]["trained"]
        ]
        way = within(spans, group)
        assert [one["name"] for one in way] == ["put", "admit", "hold", "train"]
        for index in range(group["args"]["samples"]):
            name = f"{line['group_id']}_g{index}"  # the record leaves as a whole: its samples end where the group's way begins
            (sample,) = [one for one in spans if one["name"] == name and one["ts"] + one["dur"] == group["ts"]]
            assert sample["args"]["versions"] == [line["policy_version_min"], line["policy_version_max"]]
            made = within(spans, sample)
            assert [one["name"] for one in made] == ["lease", "generate", "env", "siblings"]
            whole += sample["dur"] + group["dur"]
            unknown += sample["dur"] + group["dur"] - sum(one["dur"] for one in (*made, *way))
    assert unknown <= 0.001 * whole, f"{unknown / whole:.2%} of the samples' time is in no span"
    loop = [
        one["name"] for one in spans if one.get("args", {}).get("step") == last["step"] and "group" not in one["args"]
    ]
    assert {"step", "rollout", "train", "sync", "validation", "checkpoint"} <= set(loop)


def within(spans, parent):
    """Return the spans on the row of `parent` inside it, in order; they follow each other."""
    end = parent["ts"] + parent["dur"]
    row = [one for one in spans if (one["pid"], one["tid"]) == (parent["pid"], parent["tid"]) and one is not parent]
    found = sorted(
        (one for one in row if parent["ts"] <= one["ts"] and one["ts"] + one["dur"] <= end), key=lambda one: one["ts"]
    )
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(found)), "spans overlap"
    return found


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_finished_run_is_not_mixed_with_a_fresh_one_and_resumes_to_more_steps_from_what_is_undamaged(start):
    run = start(algorithm={"steps": 2}, checkpoint={"everySteps": 1})
    assert run.run() == 0, run.text + run.logs()
    assert run.run() == 2 and "holds a run (at step 2)" in run.text
    flip_a_bit(next((run.output / "checkpoints/step-00000002/model").iterdir()))
    assert run.run("--resume", "auto", "--set", "algorithm.steps=4") == 0, run.text + run.logs()
    assert "resumed at step 1" in run.text and "step-00000002" in run.text and "has digest" in run.text
    assert_trained_once(run, steps=4, groups=4)
    flip_a_bit(run.output / "ledger.jsonl")
    damaged = (run.output / "ledger.jsonl").read_bytes()
    assert run.run("--resume", "auto", "--set", "algorithm.steps=5") == 4, run.text
    assert "ledger.jsonl must hold the 16 lines" in run.text and "--output OTHER" in run.text
    assert "at step 4" in run.text and "step 0" not in run.text, "two step numbers for one run"
    assert (run.output / "ledger.jsonl").read_bytes() == damaged


def test_one_interrupt_checkpoints_and_ends_in_time_and_the_run_resumes(start):
    run = start(algorithm={"steps": 400}, checkpoint={"everySteps": None})
    run.start()
    run.at_step(3)
    pids = [entry["pid"] for entry in run.processes()]
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text + run.logs()  # the launcher itself ends what takes longer than its 10 s
    assert_nothing_left(run, pids)
    step = run.status()["step"]
    assert step >= 3, run.text + run.logs()
    assert (run.output / f"checkpoints/step-{step:08d}/manifest.json").is_file()
    assert run.run("--resume", "auto", "--set", f"algorithm.steps={step + 2}") == 0, run.text + run.logs()
    assert_trained_once(run, steps=step + 2, groups=4)


def test_a_second_interrupt_ends_everything_at_once(start):
    run = start(algorithm={"steps": 400})
    run.start()
    run.at_step(1)
    pids = [entry["pid"] for entry in run.processes()]
    os.kill(run.processes(role="runner")[0]["pid"], signal.SIGSTOP)  # the first interrupt would wait for it
    run.process.send_signal(signal.SIGINT)
    while "again to end at once" not in (line := run.process.stdout.readline()):
        assert line, run.logs()  # two signals at once would be one
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130 and "ending at once" in run.text, run.text + run.logs()
    assert_nothing_left(run, pids)


def test_a_killed_launcher_takes_its_processes_along(start):
    run = start(algorithm={"steps": 400})
    run.start()
    run.at_step(1)
    pids = [entry["pid"] for entry in run.processes()]
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(60)
    end = time.monotonic() + 120
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_status_top_and_logs_read_a_local_run(start):
    import subprocess
    import sys

    run = start(algorithm={"steps": 2})
    assert run.run() == 0, run.text + run.logs()

    def rljob(*arguments):
        command = [sys.executable, "-m", "rl_core.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    assert json.loads(rljob("status", str(run.output)).stdout)["step"] == 2
    assert "2/2" in rljob("top", str(run.output), "--once").stdout
    assert "rollout-0: " in rljob("logs", str(run.output), "--role", "rollout").stdout
    assert rljob("status", str(run.output / "nowhere")).returncode == 2


def test_data_parallel_actors_with_a_critic_train_every_group_once_and_send_what_changed(start):
    """PPO: the critic alone in the first step, then both; neither rollouts nor the exported model know of it."""
    run = start(
        model={"dtype": "bfloat16"},
        algorithm={
            "steps": 2,
            "name": "gae",
            "critic": {"separate": True, "valueClip": 0.2},
            "rewardKlCoefficient": 0.01,
        },
        actor={
            "replicas": 2,
            "optimizer": {"learningRate": 1.0e-5, "valueLearningRate": 1.0e-2},
            "criticWarmupSteps": 1,
        },
        rollout={"replicas": 2},
        weights={"syncer": "patch"},
    )
    assert run.run() == 0, run.text + run.logs()
    assert_trained_once(run, steps=2, groups=4)
    _, first, second = run.lines("metrics.jsonl")
    assert (
        0 < second["weights/patch_share"] < 0.5 and second["weights/patched_receivers"] == 2
    )  # and every version was proven
    assert (first["train/lr"], second["train/lr"]) == (0.0, 1.0e-5)
    for line in (first, second):
        assert line["train/value_loss"] > 0 and line["train/explained_variance"] <= 1 and "train/kl" in line
    with safe_open(run.output / "model/model.safetensors", framework="np") as exported:
        assert not [name for name in exported.keys() if "value_head" in name or "critic" in name]  # noqa: SIM118


def test_a_job_written_by_init_runs_as_it_is_started_from_python(start, tiny):
    run = start()
    init(run.job.parent / "new", task="agent", model=str(tiny / "model"), gpus=0)
    folder = run.job.parent / "new"
    document = yaml.safe_load((folder / "job.yaml").read_text())
    document["spec"]["algorithm"]["steps"] = 1
    started = start_run(RLJob.model_validate(document), output=run.output, code=folder)
    assert [line["step"] for line in started.follow()] == [0, 1]
    assert "step 1/1" in started.text()
