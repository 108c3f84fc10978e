"""The copy of a running job's output folder: equal to the folder after each refresh, and safe against a hostile runner."""

import base64
import json
import threading
import zlib

import pytest

from rl_core.api.errors import InfrastructureError
from rl_core.cli import copied_output
from rl_core.cli.copied_output import CopiedOutput
from rl_core.runner.output_files import OutputFiles
from rl_core.view.metrics import MetricColumns


class Source:
    """An output folder, and the runner's answers about it in parts of at most 64 bytes."""

    def __init__(self, folder):
        self.folder, self.status, self.calls = folder, {"phase": "Generating", "step": 1}, 0
        (folder / "samples").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(20)))
        (folder / "samples/e0-s1.jsonl").write_text("one\n")

    def ask(self, body):
        self.calls += 1
        body = json.loads(json.dumps(body))
        return self.status, json.loads(json.dumps(OutputFiles(self.folder, limit=64).read(body)))

    def files(self):
        return {name: (self.folder / name).read_bytes() for name in ("metrics.jsonl", "samples/e0-s1.jsonl")}


@pytest.fixture
def source(tmp_path):
    return Source(tmp_path / "out")


@pytest.fixture
def copied(source, tmp_path):
    found = CopiedOutput(source.ask, tmp_path / "copy")
    found.refresh()
    return found


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "status.json"
    }


def test_a_copy_is_equal_and_grows_with_its_source(source, copied, tmp_path):
    assert files_of(tmp_path / "copy") == source.files()
    assert json.loads((tmp_path / "copy/status.json").read_text()) == {"phase": "Generating", "step": 1}
    source.status = {"phase": "Generating", "step": 2}
    with (source.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20}\n')
    before = source.calls
    copied.refresh()
    assert files_of(tmp_path / "copy") == source.files() and source.calls == before + 1
    assert json.loads((tmp_path / "copy/status.json").read_text())["step"] == 2


def test_a_file_that_a_restart_has_cut_is_copied_and_read_anew(source, copied, tmp_path):
    read = MetricColumns(tmp_path / "copy/metrics.jsonl")
    assert len(read.lines()) == 20
    again = [*range(10), *range(100, 130)]  # cut to ten lines, and longer than before when it is copied again
    (source.folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in again))
    copied.refresh()
    assert files_of(tmp_path / "copy") == source.files()
    assert [line["step"] for line in read.lines()] == again


def test_a_file_that_vanishes_is_deleted_from_the_copy(source, copied, tmp_path):
    (source.folder / "samples/e0-s1.jsonl").unlink()
    copied.refresh()
    assert list(files_of(tmp_path / "copy")) == ["metrics.jsonl"]


def test_only_the_chosen_folders_are_copied(source, tmp_path):
    CopiedOutput(source.ask, tmp_path / "few", only=["samples"]).refresh()
    assert list(files_of(tmp_path / "few")) == ["samples/e0-s1.jsonl"]


@pytest.mark.parametrize("name", ["../escaped.jsonl", "/tmp/escaped.jsonl", "samples/../../escaped.jsonl", ".bashrc"])
def test_a_runner_cannot_write_elsewhere(tmp_path, name):
    data = base64.b64encode(zlib.compress(b"hostile")).decode()
    answer = {"sizes": {name: 7}, "parts": [{"name": name, "offset": 0, "data": data}]}
    with pytest.raises(InfrastructureError, match="must name files that were asked for"):
        CopiedOutput(lambda body: ({}, answer), tmp_path / "copy").refresh()
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize(
    "answer",
    [{}, {"sizes": [], "parts": []}, {"sizes": {}, "parts": [{"name": "metrics.jsonl", "offset": 0, "data": "!"}]}],
    ids=["nothing", "no sizes", "no data"],
)
def test_an_answer_that_makes_no_sense_is_an_error_of_the_runner(tmp_path, answer):
    with pytest.raises(InfrastructureError, match="must answer with sizes and parts"):
        CopiedOutput(lambda body: ({}, answer), tmp_path / "copy").refresh()


def test_following_says_once_that_the_runner_is_gone_and_goes_on_when_it_is_back(source, copied, monkeypatch, capsys):
    ended, asked = threading.Event(), []

    def ask(body):
        asked.append(body)
        if len(asked) < 3:
            raise InfrastructureError("no answer")
        ended.set()
        return source.ask(body)

    monkeypatch.setattr(copied_output, "REFRESH_SECONDS", 0)
    (source.folder / "samples/e0-s1.jsonl").write_text("one\ntwo\n")
    copied._ask = ask
    copied.follow(ended)
    assert capsys.readouterr().err.count("no answer") == 1
    assert files_of(copied._folder) == source.files()
