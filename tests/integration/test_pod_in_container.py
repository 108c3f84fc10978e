"""A pod as a container runs it: plan from the environment, accelerators audited by NVML, last word for the kubelet."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from rl_core.plan.launch import ContainerPlan, PodPlan, ProcessPlan
from tests.cluster.nvml_stub import build

UUIDS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Folder with the stub of NVML."""
    return build(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def run(tmp_path, library):
    """Run a pod to its end as its container would; returns (exit code, last word, log)."""

    def start(plan, *, visible="void", **environ):
        word = tmp_path / "termination-log"
        word.touch()
        text = plan if isinstance(plan, str) else plan.to_json()
        around = {
            **os.environ,
            "RLJOB_POD_PLAN": text,
            "RLJOB_TERMINATION_LOG": str(word),
            "RLJOB_HEALTH_PORT": "0",
            "RLJOB_HEALTH_HOST": "127.0.0.1",
            "LD_LIBRARY_PATH": str(library),
            "NVIDIA_VISIBLE_DEVICES": visible,
            **environ,
        }
        command = [sys.executable, "-m", "rl_core.launch.pod"]
        done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=240, check=False)
        assert len(word.read_bytes()) <= 4096
        return done.returncode, json.loads(word.read_text()), done.stdout + done.stderr

    return start


def process(name, code, *, devices=(), group="rollout", **env):
    return ProcessPlan(name=name, group=group, rank=0, command=("python", "-c", code), env=env, visible_devices=devices)


def pod(*processes, role="rollout"):
    containers = (ContainerPlan(name=role, image_role=role, processes=processes),)
    return PodPlan(name=f"j-{role}-0", role=role, index=0, containers=containers)


# --- accelerators ----------------------------------------------------------------------------------------------------------


def test_a_pod_starts_with_the_accelerators_it_was_given_and_names_them(run):
    plan = pod(process("a", "print('works')", devices=("0",)), process("b", "pass", devices=("1",)))
    code, word, log = run(plan, visible="GPU-aaaa,GPU-bbbb")
    assert code == word["code"] == 0 and "works" in log
    assert "accelerators: GPU-aaaa, GPU-bbbb" in log


@pytest.mark.parametrize("visible", ["void", "", "GPU-aaaa"])
def test_a_pod_with_fewer_accelerators_than_asked_for_starts_nothing_and_says_so(run, visible):
    plan = pod(process("a", "print('started')", devices=("0", "1")))
    code, word, log = run(plan, visible=visible)
    assert code == word["code"] == 2 and "started" not in log
    assert word["reason"].startswith("accelerators 0,1 were asked for and must be visible, got:")


def test_a_pod_that_sees_accelerators_of_others_says_so(run):
    plan = pod(process("a", "pass", devices=("0",)))
    _, _, log = run(plan, visible=",".join(UUIDS), RLJOB_POD_IP="10.0.0.1")
    assert "1 accelerators were asked for and 3 are visible" in log


def test_a_pod_without_accelerators_asks_no_driver(run):
    code, _, log = run(pod(process("a", "pass")), LD_LIBRARY_PATH="")
    assert code == 0 and "accelerators" not in log


# --- the plan ----------------------------------------------------------------------------------------------------------------


def test_the_plan_does_not_reach_the_processes(run):
    code, _, log = run(
        pod(process("a", "import os; print(os.environ.get('RLJOB_POD_PLAN'), os.environ['MARK'])", MARK="m"))
    )
    assert code == 0 and "None m" in log


GOOD = pod(process("a", "print('started')"))
WRONG = {
    "no JSON": "{",
    "a list": "[]",
    "an unknown field": GOOD.to_json().replace('"index"', '"indices"'),
    "a number in the environment": GOOD.to_json().replace('"env":{}', '"env":{"A":1}'),
    "no command": json.dumps(json.loads(GOOD.to_json())).replace('["python", "-c", "print(\'started\')"]', "[]"),
    "a health port that is none": GOOD.to_json().replace('"env":{}', '"env":{"RLJOB_HEALTH_PORT":"x"}'),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_plan_that_cannot_be_run_is_refused_before_anything_starts(run, text):
    assert text != GOOD.to_json()
    code, word, log = run(text)
    assert code == word["code"] == 2 and "started" not in log
    assert "RLJOB_POD_PLAN must be a pod plan" in word["reason"] and "same release" in word["reason"]


def test_a_pod_without_a_plan_says_where_plans_come_from(tmp_path):
    word = tmp_path / "termination-log"
    word.touch()
    around = {key: value for key, value in os.environ.items() if key != "RLJOB_POD_PLAN"}
    done = subprocess.run(
        [sys.executable, "-m", "rl_core.launch.pod"],
        env={**around, "RLJOB_TERMINATION_LOG": str(word)},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2 and "RLJOB_POD_PLAN must hold the pod plan" in json.loads(word.read_text())["reason"]


def test_an_output_folder_that_cannot_be_made_is_a_configuration_error(run, tmp_path):
    taken = tmp_path / "file"
    taken.touch()
    code, word, log = run(GOOD, RLJOB_OUTPUT=str(taken / "sums-1"))
    assert code == 2 and "checkpoint.path" in word["reason"] and "started" not in log


def test_the_output_folder_is_there_before_the_processes_are(run, tmp_path):
    look = process("a", "import os; print('folder', os.path.isdir(os.environ['RLJOB_OUTPUT']))")
    _, _, log = run(pod(look), RLJOB_OUTPUT=str(tmp_path / "deep" / "sums-1"))
    assert "folder True" in log


# --- the last word -----------------------------------------------------------------------------------------------------------

LEAVE = """
import json, os, sys
status = {"epoch": %d, "phase": "Finished", "step": 12, "totalSteps": 12, "policyVersion": 12, "reward": 0.5,
          "metrics": {"reward/mean": 0.5, "loss": float("nan")}, "members": [{"pod": "x" * 100}] * 500}
open(os.path.join(os.environ["RLJOB_OUTPUT"], "status.json"), "w").write(json.dumps(status))
"""


def runner(epoch, code):
    return process("runner", LEAVE % epoch + f"sys.exit({code})", group="runner", RLJOB_EPOCH="3")


@pytest.mark.parametrize("code", [0, 3])
def test_actor_0_tells_the_runners_last_status_with_its_end(run, tmp_path, code):
    ended, word, _ = run(pod(runner(3, code), role="actor"), RLJOB_OUTPUT=str(tmp_path / "out"))
    assert ended == word["code"] == code
    assert word["summary"] == {
        "epoch": 3,
        "phase": "Finished",
        "step": 12,
        "totalSteps": 12,
        "policyVersion": 12,
        "reward": 0.5,
        "metrics": {"reward/mean": 0.5, "loss": None},
    }


def test_the_status_of_an_earlier_epoch_is_not_this_ones_last_word(run, tmp_path):
    _, word, _ = run(pod(runner(2, 0), role="actor"), RLJOB_OUTPUT=str(tmp_path / "out"))
    assert word["summary"] is None


def test_the_last_word_names_the_process_and_its_last_lines(run):
    talk = "for n in range(2000): print('line', n, '\\U0001f600' * 5)\nraise SystemExit(4)"
    code, word, _ = run(pod(process("rollout-7", talk)))
    assert (
        code == word["code"] == 4 and word["process"] == "rollout-7" and word["reason"] == "rollout-7 ended with code 4"
    )
    assert word["tail"].splitlines()[-1].startswith("line 1999") and word["summary"] is None


def test_a_restartable_process_is_not_started_when_the_pod_is_refused(run):
    plan = pod(replace(process("a", "print('started')", devices=("5",)), restart=True))
    code, _, log = run(plan, visible="GPU-aaaa")
    assert code == 2 and "started" not in log


def test_a_run_on_one_machine_is_refused_where_its_accelerators_are_too_small_or_too_few(tmp_path, library):
    """They have 80 GiB; the 70 billion parameters of this model, their gradients and moments take more."""
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    rest = {"intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(sizes | rest))
    actor = {"gpus": 2, "processesPerPod": 2}
    spec = {"model": {"path": str(tmp_path)}, "data": {"train": "t"}, "actor": actor}
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    code = f"from rl_core.api.job import RLJob\nfrom rl_core.cli.run import check_devices\ncheck_devices(RLJob.model_validate({job}))"

    def told(visible, **environ):
        around = os.environ | {"LD_LIBRARY_PATH": str(library), "NVIDIA_VISIBLE_DEVICES": visible} | environ
        done = subprocess.run([sys.executable, "-c", code], env=around, capture_output=True, text=True, check=False)
        return done.stderr

    assert "of device memory, got 80.00 GiB available; largest part" in told(",".join(UUIDS))
    assert "the job asks for 2 accelerators, got 1 visible" in told(UUIDS[0])
    assert "CAPACITY_CHECK=warn, so the job continues: role actor" in told(",".join(UUIDS), CAPACITY_CHECK="warn")
