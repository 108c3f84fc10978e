"""`rljob plan` shows where each process runs, in its pod and where one machine has all of them."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from rl_core.api.errors import CapacityError, ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.cli.job_file import JobProblems, load_job
from rl_core.cli.plan import layout_line, process_table, show_plan
from rl_core.cli.validate import memory_report, validate_file
from rl_core.plan.launch import build_launch_plan


def test_each_process_is_shown_with_the_devices_of_its_placement():
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "actor": {"gpus": 2, "processesPerPod": 2},
            "rollout": {"replicas": 2, "gpus": 1},
            "placement": {"componentPlacement": {"rollout": "0-1", "actor": "2-3"}},
        }
    )
    plans = [build_launch_plan(spec, name="sums", uid="u", host=host) for host in (None, "127.0.0.1")]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(process_table(*plans))
    rows = [line.split() for line in shown.get().splitlines() if "sums-" in line]
    assert [(row[1], row[3], row[4]) for row in rows] == [
        ("runner", "cpu", "cpu"),
        ("channel", "cpu", "cpu"),
        ("actor-0", "0", "2"),
        ("actor-1", "1", "3"),
        ("rollout-0", "0", "0"),
        ("rollout-1", "0", "1"),
        ("env-0", "cpu", "cpu"),
    ]


def test_the_ranks_of_a_model_that_is_cut_are_processes_like_others_and_the_layout_is_told():
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "actor": {
                "backend": "megatron",
                "replicas": 2,
                "processesPerPod": 4,
                "parallel": {"tensor": 2, "pipeline": 2},
            },
        }
    )
    plan = build_launch_plan(spec, name="sums", uid="u")
    ranks = [
        (pod.name, process.rank, process.env["WORLD_SIZE"])
        for pod in plan.pods
        for container in pod.containers
        for process in container.processes
        if process.name.startswith("actor-")
    ]
    assert ranks == [(f"sums-actor-{rank // 4}", rank, "8") for rank in range(8)]
    assert layout_line(spec.actor) == "actor: megatron, 8 ranks = data 2 x tensor 2 x pipeline 2"


MODEL = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a job of a model of 8B parameters with the given blocks and returns its file."""

    def write(**blocks):
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        rollout = {"engine": "sglang", "gpus": 1, "maxSequenceLength": 4096}
        spec = {
            "model": {"path": str(tmp_path), "dtype": "bfloat16"},
            "data": {"train": "t"},
            "actor": {"gpus": 8, "gradientCheckpointing": True},
            "rollout": rollout,
        }
        job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": spec | blocks}
        file = tmp_path / "job.yaml"
        file.write_text(json.dumps(job))
        return file

    return write


def test_accelerators_of_the_actor_have_a_process_each(written, capsys):
    assert show_plan(written(), []) == 0
    assert "actor: fsdp2, 8 ranks" in capsys.readouterr().out


def test_a_plan_that_was_compared_with_no_device_says_so(written, capsys):
    words = "The estimate was compared with no device; give the memory of one in GiB: --device-memory 80\n"
    show_plan(written(), [])
    assert words in capsys.readouterr().out
    show_plan(written(), [], device_memory=80)
    compared = capsys.readouterr().out
    assert words not in compared and "holds 89 sequences of rollout.maxSequenceLength at a time, of 128" in compared
    show_plan(written(actor={}, rollout={}), [])
    assert words not in capsys.readouterr().out, "a job on a CPU has no device"


def test_a_plan_of_a_policy_that_acts_in_simulators_has_no_estimate(capsys):
    example = Path(__file__).parents[3] / "examples/embodied/cartpole.yaml"
    assert show_plan(example, [], device_memory=80) == 0
    assert "The memory of a policy that acts in simulators is not estimated" in capsys.readouterr().out
    assert memory_report(load_job(example, []), 80) is None


def test_a_plan_tells_all_groups_that_do_not_fit_and_accelerators_that_are_idle(written, capsys):
    file = written(actor={"gpus": 2, "processesPerPod": 1}, rollout={"gpus": 1, "maxSequenceLength": 4096})
    with pytest.raises(
        CapacityError, match=r"(?s)^role actor,.*\nrole rollout,.*\nThe estimate is an upper bound\. If it is"
    ):
        show_plan(file, [], device_memory=80)
    assert "warning: actor.processesPerPod must be actor.gpus 2" in capsys.readouterr().out
    with pytest.raises(JobProblems) as refused:
        validate_file(file, [], device_memory=80)
    assert {"actor.processesPerPod must be", "role actor, phase", "role rollout, phase"} <= {
        start
        for start in ("actor.processesPerPod must be", "role actor, phase", "role rollout, phase")
        if start in str(refused.value)
    }


def test_a_plan_says_that_a_list_of_trackers_replaces_the_default(written, capsys):
    notice = "Metrics go to metrics.jsonl, wandb. The list trackers replaces the default, which has tensorboard"
    for trackers, expected in ([{"name": "wandb"}], True), ([{"name": "wandb"}, {"name": "tensorboard"}], False):
        show_plan(written(trackers=trackers), [])
        assert (notice in capsys.readouterr().out) == expected
    show_plan(written(), [])
    assert "Metrics go to" not in capsys.readouterr().out


def test_adapters_of_layers_that_the_model_lacks_are_refused(written):
    file = written(model={"path": str(written().parent), "dtype": "bfloat16", "lora": {"layers": [40, 2, 36]}})
    words = r"model\.lora\.layers must be below 36, the number of the model's layers, got \[36, 40\]; remove them"
    with pytest.raises(ConfigError, match=f"^{words}$"):
        show_plan(file, [])
    with pytest.raises(JobProblems, match=words):
        validate_file(file, [], device_memory=80)
