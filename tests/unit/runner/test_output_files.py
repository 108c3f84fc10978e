"""The files that the runner hands out: what was appended, anew what was cut, and nothing that its callers may not have."""

import base64
import os
import zlib

import pytest

from rl_core.runner.output_files import OutputFiles, end_checksum, is_served

ALL = ["", "samples", "traces"]


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "out"
    for name, text in {
        "metrics.jsonl": '{"step": 1}\n',
        "status.json": "{}",
        "samples/e0-s1.jsonl": "one\n",
        "samples/e0-s1.index": "[1]\n",
        "traces/e0-s1.json": "[\n",
        ".rljob/keys/control.token": "secret",
        "samples/.hidden.jsonl": "hidden",
        "samples/deeper/e0-s1.jsonl": "deeper",
        "checkpoints/step-1/model.safetensors": "weights",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def ask(output, have=None, *, folders=ALL, limit=1 << 20):
    answer = OutputFiles(output, limit=limit).read({"have": have or {}, "folders": folders})
    parts = {
        part["name"]: (part["offset"], zlib.decompress(base64.b64decode(part["data"]))) for part in answer["parts"]
    }
    return answer["sizes"], parts


def part_of(path, size=None):
    """Return what a copy says of its first `size` bytes of a file (None: all)."""
    with path.open("rb") as file:
        size = path.stat().st_size if size is None else size
        return [size, end_checksum(file, size)]


def test_only_the_files_that_the_commands_read_are_handed_out(output):
    sizes, parts = ask(output)
    assert parts == {
        "metrics.jsonl": (0, b'{"step": 1}\n'),
        "samples/e0-s1.jsonl": (0, b"one\n"),
        "samples/e0-s1.index": (0, b"[1]\n"),
        "traces/e0-s1.json": (0, b"[\n"),
    }
    assert sizes == {name: len(data) for name, (_, data) in parts.items()}
    assert list(ask(output, folders=["traces"])[0]) == ["traces/e0-s1.json"]


def test_a_copy_gets_what_was_appended_and_nothing_when_it_has_all(output):
    path = output / "metrics.jsonl"
    have = {"metrics.jsonl": part_of(path)}
    assert ask(output, have, folders=[""]) == ({"metrics.jsonl": 12}, {})
    with path.open("a") as file:
        file.write('{"step": 2}\n')
    assert ask(output, have, folders=[""]) == ({"metrics.jsonl": 24}, {"metrics.jsonl": (12, b'{"step": 2}\n')})


@pytest.mark.parametrize("text", ['{"step": 9}\n', "short\n", '{"step": 9}\n{"step": 10}\n', ""])
def test_a_file_that_is_another_one_than_the_copy_is_sent_from_its_beginning(output, text):
    path = output / "metrics.jsonl"
    have = {"metrics.jsonl": part_of(path)}
    path.write_text(text)
    sizes, parts = ask(output, have, folders=[""])
    assert sizes == {"metrics.jsonl": len(text)}
    assert parts.get("metrics.jsonl", (0, b"")) == (0, text.encode())


def test_a_change_long_before_the_end_of_a_file_that_was_cut_and_grew_is_seen(output):
    path = output / "metrics.jsonl"
    path.write_bytes(b"".join(b"%09d\n" % number for number in range(2000)))
    have = {"metrics.jsonl": part_of(path, 10_000)}
    path.write_bytes(b"".join(b"%09d\n" % (number if number < 900 else number + 1) for number in range(2000)))
    assert ask(output, have, folders=[""])[1]["metrics.jsonl"][0] == 0


def test_an_answer_has_at_most_limit_bytes_and_the_next_ones_the_rest(output):
    content = os.urandom(2500)
    (output / "samples/e0-s2.jsonl").write_bytes(content)
    got, answers = b"", 0
    while True:
        copy = output.parent / "copy"
        copy.write_bytes(got)
        have = {"samples/e0-s2.jsonl": part_of(copy)} if got else {}
        _, parts = ask(output, have, folders=["samples"], limit=1000)
        assert sum(len(data) for _, data in parts.values()) <= 1000
        if "samples/e0-s2.jsonl" not in parts:
            break
        offset, data = parts["samples/e0-s2.jsonl"]
        assert offset == len(got)
        got, answers = got + data, answers + 1
    assert got == content and answers == 3


def test_links_and_what_is_no_file_are_left_out(output):
    secret = output / ".rljob/keys/control.token"
    (output / "samples/link.jsonl").symlink_to(secret)
    os.mkfifo(output / "samples/pipe.jsonl")
    (output / "samples/folder.jsonl").mkdir()
    (output / "traces").rename(output / "real-traces")
    (output / "traces").symlink_to(output / "real-traces")
    assert sorted(ask(output)[0]) == ["metrics.jsonl", "samples/e0-s1.index", "samples/e0-s1.jsonl"]


@pytest.mark.parametrize(
    "name",
    [
        ".rljob/keys/control.token",
        "../out/metrics.jsonl",
        "/etc/passwd",
        "samples/../status.json",
        "samples/x\0.jsonl",
        "",
    ],
)
def test_a_name_of_the_caller_opens_nothing(output, name):
    sizes, parts = ask(output, {name: [4, "0" * 64]})
    assert not is_served(name) and name not in sizes and name not in parts


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "have and folders"),
        ({"have": []}, "have and folders"),
        ({"have": {}, "folders": ["../.rljob"]}, "folders must be of"),
        ({"have": {}, "folders": [["samples"]]}, "folders must be of"),
        ({"have": {"metrics.jsonl": 3}, "folders": [""]}, r"\[bytes, checksum\]"),
        ({"have": {"metrics.jsonl": [-1, ""]}, "folders": [""]}, "must not be negative"),
        ({"have": {"metrics.jsonl": [True, ""]}, "folders": [""]}, r"\[bytes, checksum\]"),
    ],
    ids=["nothing", "a list", "another folder", "no name", "no part", "negative", "a truth value"],
)
def test_a_wrong_body_is_refused(output, body, words):
    with pytest.raises(ValueError, match=words):
        OutputFiles(output).read(body)


def test_a_run_that_has_written_nothing_has_no_files(tmp_path):
    assert ask(tmp_path / "missing") == ({}, {})
