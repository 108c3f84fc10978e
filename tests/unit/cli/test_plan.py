"""`rljob plan` shows where each process runs, in its pod and where one machine has all of them."""

from rich.console import Console

from rl_core.api.job import RLJobSpec
from rl_core.cli.plan import layout_line, process_table
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
