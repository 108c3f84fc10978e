"""The tracker trackio: metrics, samples and the job are in the output folder, and the library never holds up a run.

Each run is a process, as the library reads its folder once.
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.settings import TrackerSpec
from rl_core.observability.trackers import Trackers

OPEN = """
import sys, time
from pathlib import Path
from rl_core.api.settings import TrackerSpec
from rl_core.observability.trackers import SampleRow, Trackers

def opened(name="a", **spec):
    return Trackers.build([TrackerSpec(name="trackio", **spec)], name=name, output=Path(sys.argv[1]))
"""
RUN = """
trackers = opened()
trackers.log_config({"spec": {"model": "m", "seed": None}})
trackers.add_samples("train", 3, [SampleRow("0-1", 0, 0.5, "stop", "2+2=", "4 <b>bold</b> \\ud800")])
trackers.log(3, {"reward/mean": 0.5, "train/kl": float("nan"), "text": "left out"})
trackers.log(4, {"reward/mean": 0.25})
trackers.finish("Finished")
assert not trackers.disabled, trackers.disabled
"""
TABLE = [
    {"group": "0-1", "sample": 0, "reward": 0.5, "reason": "stop", "prompt": "2+2=", "response": "4 <b>bold</b> ?"}
]
ROWS = [
    (3, {"samples/train": {"_type": "trackio.table", "_value": TABLE}}),
    (3, {"reward/mean": 0.5}),
    (4, {"reward/mean": 0.25}),
]


def environment(tmp_path, **variables):
    """Return the environment of a run whose home folder is `home`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TRACKIO_", "HF_"))}
    return {**kept, "HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path), **variables}


def run(tmp_path, code, **variables):
    """Run `code` in a process whose output folder is `out`; return the process, which has ended."""
    for folder in ("out", "home"):
        (tmp_path / folder).mkdir(exist_ok=True)
    command = [sys.executable, "-c", OPEN + code, str(tmp_path / "out")]
    return subprocess.run(command, env=environment(tmp_path, **variables), capture_output=True, text=True, timeout=120)


def rows(folder, project="rljob"):
    """Return (run id, run name, step, metrics) of each row that Trackio has in `folder`, in the order of their writing."""
    with sqlite3.connect(folder / f"{project}.db") as database:
        found = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    return [(run_id, name, step, json.loads(metrics)) for run_id, name, step, metrics in found]


def test_metrics_samples_and_the_job_are_in_the_output_folder_and_nothing_is_in_the_home_folder(tmp_path):
    done = run(tmp_path, RUN, TRACKIO_DIR=str(tmp_path / "elsewhere"))
    assert done.returncode == 0, done.stderr
    assert [row[2:] for row in rows(tmp_path / "out" / "trackio")] == ROWS
    assert not list((tmp_path / "home").iterdir()) and not (tmp_path / "elsewhere").exists()
    read = (
        "import json, trackio; (run,) = trackio.Api().runs('rljob'); print(json.dumps([run.name, run.config['spec']]))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", read],
        env=environment(tmp_path, TRACKIO_DIR=str(tmp_path / "out" / "trackio")),
        capture_output=True,
        text=True,
    )
    assert json.loads(shown.stdout) == ["a", {"model": "m", "seed": None}], shown.stderr


def test_a_runner_that_is_killed_leaves_its_metrics_and_the_next_one_continues_the_run(tmp_path):
    killed = """
import os, signal, sqlite3

def written():
    try:
        return sqlite3.connect(Path(sys.argv[1]) / "trackio" / "rljob.db").execute("select count(*) from metrics").fetchone()[0]
    except sqlite3.Error:  # the table is not there yet
        return 0

trackers = opened()
trackers.log(2, {"reward/mean": 1.0})
while not written():
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(tmp_path, killed).returncode == -signal.SIGKILL
    assert run(tmp_path, RUN).returncode == 0
    found = rows(tmp_path / "out" / "trackio")
    assert [row[2:] for row in found] == [(2, {"reward/mean": 1.0}), *ROWS]
    assert len({row[:2] for row in found}) == 1


def test_a_server_has_each_start_as_a_run_and_the_output_folder_holds_no_metrics(tmp_path):
    """The address of the job has precedence over a Space in the environment."""
    served = """
import sys, trackio
_, url, _, _ = trackio.show(open_browser=False, block_thread=False)
print("URL", url, flush=True)
sys.stdin.read()
"""
    variables = {"TRACKIO_WRITE_TOKEN": "secret"}
    folder = tmp_path / "server"
    with subprocess.Popen(
        [sys.executable, "-c", served],
        env=environment(tmp_path, TRACKIO_DIR=str(folder), **variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        url = next(line.split()[1] for line in server.stdout if line.startswith("URL"))
        code = RUN.replace("opened()", f"opened(project='p', uri={url!r})")
        for _ in range(2):
            done = run(tmp_path, code, TRACKIO_SPACE_ID="nobody/nothing", **variables)
            assert done.returncode == 0, done.stderr
        server.stdin.close()
    found = rows(folder, "p")
    assert sorted((row[1:] for row in found), key=str) == sorted([("a", *row) for row in ROWS] * 2, key=str)
    assert len({run_id for run_id, *_ in found}) == 2
    assert not list((tmp_path / "out").rglob("*.db"))


def test_a_hub_that_never_answers_holds_up_neither_a_step_nor_the_end(tmp_path):
    code = """
from rl_core.observability import trackers as module
module.FINISH_SECONDS = 0.5
trackers = opened(offline=True)
trackers.log(1, {"reward/mean": 0.5})
trackers.finish("Finished")
assert trackers.disabled == {"trackio": "TimeoutError: trackio has not ended within 0.5 s, its last metrics may be missing"}
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = "http://{}:{}".format(*silent.getsockname())
        done = run(tmp_path, code, HF_TOKEN="hf_x", HF_ENDPOINT=url, TRACKIO_SPACE_ID="nobody/nothing")
        assert done.returncode == 0, done.stderr
        silent.settimeout(10)
        silent.accept()  # it was asked


def test_an_error_of_the_library_disables_the_tracker_and_says_why(tmp_path):
    code = """
trackers = opened(uri="http://127.0.0.1:1")
while not trackers.disabled:
    trackers.log(1, {"reward/mean": 0.5})
    time.sleep(0.05)
trackers.finish("Finished")
print(trackers.disabled["trackio"])
"""
    done = run(tmp_path, code)
    assert done.returncode == 0 and "ValueError: Self-hosted logging requires a write token" in done.stdout, (
        done.stdout,
        done.stderr,
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"uri": "http://server:7860", "offline": True},
            "takes uri or offline, got uri http://server:7860 with offline true",
        ),
        ({"uri": "name/space"}, "must be the http:// or https:// address of a Trackio server, got name/space"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, spec, message):
    with pytest.raises(ConfigError, match=message):
        Trackers.build([TrackerSpec(name="trackio", **spec)], name="a", output=tmp_path)
