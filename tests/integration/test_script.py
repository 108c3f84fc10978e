"""A script with worker processes of its own: groups, results by rank, placement, failures, and the end of every process."""

import ast
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rl_core import Channel, Cluster
from rl_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    InfrastructureError,
    PlacementError,
    RemoteError,
    WorkerLost,
)
from rl_core.plan.placement import FlexiblePlacementStrategy, PackedPlacementStrategy
from tests.integration.script_workers import Adder, Doomed
from tests.small_models import save_policy

SCRIPT = Path(__file__).with_name("script_workers.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster.local(processes=3, output=tmp_path_factory.mktemp("script")) as started:
        yield started


@pytest.fixture(scope="module")
def group(cluster):
    return Adder.create_group({"start": 100}).launch(cluster, name="adder")


def test_a_group_has_a_process_in_each_slot_and_results_come_by_rank(group):
    assert group.add(1).wait(timeout=60) == [101, 111, 121]
    assert group.execute_on(2, 0).add(1).wait(timeout=60) == [101, 121]
    names = [name for *name, _ in group.who().wait(timeout=60)]
    assert names == [["adder", rank, 3] for rank in range(3)]


def test_a_channel_goes_from_workers_to_the_script_until_all_producers_are_done(group):
    channel = Channel.create("items")
    group.execute_on(1).put(channel, ["a", "b"]).wait(timeout=60)
    assert [channel.get(timeout=60), channel.get(timeout=60)] == ["a", "b"]


def test_a_worker_calls_a_method_of_another_one(group):
    assert group.execute_on(0).ask(2, 1).wait(timeout=60) == [121]


def test_a_strategy_places_processes_and_another_group_shares_the_slots(cluster, group):
    pair = Adder.create_group({"start": 0}).launch(
        cluster, name="pair", placement_strategy=FlexiblePlacementStrategy([[0], [2]])
    )
    assert pair.add(0).wait(timeout=60) == [0, 10]
    assert not {pid for *_, pid in pair.who().wait(timeout=60)} & {pid for *_, pid in group.who().wait(timeout=60)}


def test_what_cannot_be_launched_is_refused_with_a_way_out(cluster, group):
    made = Adder.create_group({"start": 0})
    with pytest.raises(ConfigError, match="must be used once in a cluster, got adder again"):
        made.launch(cluster, name="adder")
    with pytest.raises(ConfigError, match="DNS-1123"):
        made.launch(cluster, name="Not A Name")
    with pytest.raises(ConfigError, match="placement_strategy must be one of"):
        made.launch(cluster, name="other", placement_strategy="0-1")
    with pytest.raises(PlacementError, match="out of range"):
        made.launch(cluster, name="other", placement_strategy=PackedPlacementStrategy(0, 5))
    with pytest.raises(ConfigError, match="one cluster at a time"):
        Cluster.local()


def test_an_error_of_one_rank_is_raised_with_group_rank_and_method(group):
    with pytest.raises(RemoteError, match="adder rank 1: fail_on raised KeyError: 'no such row'"):
        group.fail_on(1).wait(timeout=60)


def test_a_wait_is_bounded_and_names_who_is_missing(group):
    with pytest.raises(DeadlineExceeded, match="adder:0 .*serving|adder:0 .*ready"):
        group.execute_on(0).sleep(2).wait(timeout=0.1)


def test_a_wait_tells_the_channel_that_the_missing_one_waits_for(cluster, group):
    channel = Channel.create("empty")
    taken = group.execute_on(2).take(channel)
    while cluster.hub.get("adder:2").wait is None:
        time.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match=r"adder:2 .*waits for items on channel empty since"):
        taken.wait(timeout=0.1)
    channel.put("late", timeout=60)
    assert taken.wait(timeout=60) == ["late"]


def test_a_worker_may_print_much(group):
    assert group.execute_on(0).print_much(100).wait(timeout=120) == ["done"]


@pytest.mark.parametrize("life", ["first", "second"])
def test_a_killed_rank_is_named_and_replaced_and_the_others_go_on(cluster, group, life):
    before = [pid for *_, pid in group.who().wait(timeout=60)]
    with pytest.raises(WorkerLost, match="adder:1 is lost: its process ended with code 137"):
        group.die_on(1).wait(timeout=60)
    cluster.wait_ready(["adder"], timeout=60)
    after = [pid for *_, pid in group.who().wait(timeout=60)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert group.add(1).wait(timeout=60) == [101, 111, 121]


@pytest.mark.parametrize(
    ("end", "code"), [("end", 0), ("raise", 1), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -9)]
)
def test_no_process_outlives_the_script(end, code):
    script = subprocess.Popen(
        [sys.executable, str(SCRIPT), end if isinstance(end, str) else "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    first = script.stdout.readline()
    assert first.startswith("[6, 16] "), script.communicate(timeout=60)
    pids = [int(pid) for pid in first.split("] ")[1].split()]
    if not isinstance(end, str):
        script.send_signal(end)
    assert script.wait(timeout=60) == code
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"left behind: {pids}"
        time.sleep(0.05)
    _, errors = script.communicate()
    if end == signal.SIGINT:
        assert "KeyboardInterrupt" in errors and "supervisor" not in errors, (
            "no warning for workers that end as expected"
        )


def test_a_class_that_no_other_process_can_import_is_refused():
    code = "from rl_core import Worker\nclass Mine(Worker): pass\nMine.create_group()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "__main__.Mine: it has no file; write it into a module, for example own.py" in done.stderr


def test_the_code_of_the_tutorial_runs_as_a_script_and_as_a_job(tmp_path):
    page = (Path(__file__).parents[2] / "docs/own-pipeline.md").read_text()
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL)
    script, program, scorer = (
        next(text for kind, text in blocks if kind == "python" and f"class {name}(" in text)
        for name in ("Square", "Squares", "Scorer")
    )
    job, scoring = (yaml.safe_load(text) for kind, text in blocks if kind == "yaml")
    (tmp_path / "own.py").write_text(f"{program}\n\n{script}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    save_policy(tmp_path / "model")
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = run([sys.executable, "own.py"], env=environ)
    [comment] = re.findall(r"print\(group.apply.* # (.*)", script)
    assert (done.returncode, done.stdout.strip()) == (0, comment), done.stderr
    job["spec"]["algorithm"]["steps"] = 2
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = run([sys.executable, "-m", "rl_core.cli.main", "run", "job.yaml", "--output", "out"], env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/mean"] for line in lines] == [30.0, 30.0]
    (tmp_path / "own.py").write_text(f"{program}\n\n{scorer}\n\n{script}")
    job["spec"]["groups"] += scoring["groups"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = run([sys.executable, "-m", "rl_core.cli.main", "validate", "job.yaml"], env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_of_batches_loses_no_text_and_fills_each_batch():
    example = Path(__file__).parents[2] / "examples/pipeline/batches.py"
    code = "import ast, sys, batches\nif __name__ == '__main__': print(batches.main(ast.literal_eval(sys.argv[1])))"
    texts = [chr(97 + row % 26) * (1 + row % 20) for row in range(60)]
    done = subprocess.run(
        [sys.executable, "-c", code, repr(texts)],
        env={**os.environ, "PYTHONPATH": f"{example.parent}:{Path.cwd()}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout)
    for key, wanted in (("short", lambda text: len(text) <= 8), ("long", lambda text: len(text) > 8)):
        batches = found[key]
        assert sorted(text for batch in batches for text in batch) == sorted(filter(wanted, texts))
        assert all(batches) and all(sum(map(len, batch)) <= 32 for batch in batches)
        for batch, following in itertools.pairwise(batches):
            assert sum(map(len, batch)) + len(following[0]) > 32


@pytest.mark.parametrize(
    ("end", "error", "text"),
    [
        (
            "kill",
            InfrastructureError,
            "the processes of group doomed-kill have ended: doomed-kill-1 ended by signal SIGKILL",
        ),
        ("raise", RemoteError, "doomed-raise rank 1: __init__ raised ValueError: bad config"),
    ],
)
def test_a_rank_that_ends_or_fails_while_the_group_is_formed_is_named(cluster, end, error, text):
    with pytest.raises(error, match=text):
        Doomed.create_group(end).launch(cluster, name=f"doomed-{end}", timeout=60)


def test_the_pipeline_example_gives_what_a_loop_in_one_process_gives():
    example = Path(__file__).parents[2] / "examples/pipeline/pipeline.py"
    done = subprocess.run([sys.executable, str(example), "30"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == {row: row * row for row in range(30)}
