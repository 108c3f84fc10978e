"""`rljob plan` shows where each process runs, in its pod and where one machine has all of them."""

from rich.console import Console

from rl_core.api.job import RLJobSpec
from rl_core.cli.plan import process_table
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
