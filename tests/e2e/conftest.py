"""Real runs of the `rljob` command on a tiny model. Each test looks at what a user would look at: files, output, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.observability.metric_list import find
from tests.e2e.harness import Run, job_document

REWARD = '''
import os, time


def letter_a(prompts, completions, **columns):
    """Share of the letter a: a task that a random model learns within tens of steps."""
    time.sleep(float(os.environ.get("RLJOB_TEST_PAUSE", "0")))
    return [text.count("a") / max(len(text), 1) for text in completions]
'''


def pytest_collection_modifyitems(items):
    """Whole runs have more time than other tests: on a slow machine two of them, one after the other, take minutes."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with model/, data/ and reward.py: Qwen2 architecture, 2 layers, random weights, character tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    code = Path(__file__).parent / "make_tiny.py"
    subprocess.run([sys.executable, str(code), str(folder)], check=True, timeout=600)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture
def start(tmp_path, tiny):
    """Make a Run of the tiny job; ended with the test."""
    made: list[Run] = []

    def make(*arguments: str, folder: str = "run", pause: float = 0.0, **spec) -> Run:
        """`pause` seconds pass in each call of the reward: a run that goes on while a process starts leaves that process the processors."""
        made.append(Run(tmp_path / folder, job_document(tiny, **spec), *arguments, python_path=tiny))
        made[-1].env["RLJOB_TEST_PAUSE"] = str(pause)
        return made[-1]

    yield make
    for run in made:
        run.end()
    unknown = {name for run in made if not run.own_metrics for name in run.metric_names() if find(name) is None}
    assert not unknown, f"metrics that rl_core/observability/metric_list.py does not list: {sorted(unknown)}"


@pytest.fixture
def small_disk(tmp_path) -> Path:
    """A file system of 4 MiB, made by root as tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root; CI runs this as root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
