"""`hf://` references are fetched over HTTP from the endpoint, before anything starts (here: a local server)."""

import hashlib
import io
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from pyarrow import Table
from pyarrow.parquet import write_table

from rl_core.data.source import read_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = {
    "config.json": b'{"architectures": ["Qwen2ForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
}
SPLIT = "main/train/0000.parquet"
ABSENT = ("nobody", "mirrored")
"""Owners of no repository. Of the second the server answers a bare 404, as mirrors of the hub do."""
DATA = {"train.jsonl": b'{"prompt": "1+1=", "answer": "2"}\n'}


def parquet():
    buffer = io.BytesIO()
    write_table(Table.from_pylist([{"question": "1+1=", "answer": "2"}]), buffer)
    return {SPLIT: buffer.getvalue()}


CONVERTED = parquet()


class Hub(BaseHTTPRequestHandler):
    """The few endpoints of a hub that a download needs."""

    def files(self):
        if "convert" in self.path:
            self.commit = "convert" + COMMIT[7:]
            return CONVERTED
        self.commit = COMMIT
        return DATA if "datasets" in self.path else MODEL

    def do_HEAD(self):
        self.serve(body=False)

    def do_GET(self):
        self.serve(body=True)

    def serve(self, *, body):
        if "/tree/" in self.path:
            tree = [
                {"type": "file", "path": name, "size": len(text), "oid": "0" * 40}
                for name, text in self.files().items()
            ]
            self.answer(200, json.dumps(tree).encode(), body)
        elif self.path.startswith("/api/") and not any(f"/{owner}/" in self.path for owner in ABSENT):
            found = [{"rfilename": name} for name in self.files()]
            content = json.dumps(
                {"id": "owner/name", "sha": self.commit, "siblings": found, "tags": [], "private": False}
            ).encode()
            self.answer(200, content, body)
        elif (
            "/resolve/" in self.path
            and (name := unquote(self.path.split("/resolve/")[1].partition("/")[2])) in self.files()
        ):
            self.answer(200, self.files()[name], body)
        else:
            self.answer(404, b"{}", body)

    def answer(self, code, content, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        if code == 404 and "/nobody/" in self.path:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Repo-Commit", getattr(self, "commit", COMMIT))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()[:40]}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def fetch(endpoint, home, reference):
    return run(endpoint, home, "-c", f"from rl_core.data.hub import fetch; print(fetch({reference!r}))")


def run(endpoint, home, *arguments):
    env = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "PATH": "/usr/bin",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=240)


def test_a_model_is_fetched_as_a_folder(endpoint, tmp_path):
    done = fetch(endpoint, tmp_path, "hf://owner/name@main")
    assert done.returncode == 0, done.stderr
    folder = done.stdout.strip()
    for name, content in MODEL.items():
        with open(f"{folder}/{name}", "rb") as file:
            assert file.read() == content


def test_a_data_file_is_fetched_from_a_data_set(endpoint, tmp_path):
    done = fetch(endpoint, tmp_path, "hf://owner/name/train.jsonl")
    assert done.returncode == 0, done.stderr
    with open(done.stdout.strip(), "rb") as file:
        assert file.read() == DATA["train.jsonl"]


def test_a_split_is_fetched_as_a_folder_of_parquet_files(endpoint, tmp_path):
    done = fetch(endpoint, tmp_path, "hf://owner/name?split=train&config=main")
    assert done.returncode == 0, done.stderr
    assert read_rows(done.stdout.strip(), field="data.train") == [{"question": "1+1=", "answer": "2"}]


def test_validation_asks_the_hub_for_what_the_job_names(endpoint, tmp_path):
    sets = {
        "right": "hf://owner/name?split=train&config=main",
        "split": "hf://owner/name?split=test&config=main",
        "file": "hf://owner/name/absent.jsonl",
        "repo": "hf://nobody/name?split=train",
        "none": "hf://owner/name",
        "form": "hf://owner/name?config=main",
        "mirror": "hf://mirrored/name?split=train",
    }
    job = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "hub"},
        "spec": {
            "model": {"path": "hf://owner/name"},
            "data": {"sets": [{"name": name, "train": train} for name, train in sets.items()]},
        },
    }
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job))
    done = run(endpoint, tmp_path, "-m", "rl_core.cli.main", "validate", str(file))
    told = {line.partition("data.sets.")[2][:7]: line for line in done.stderr.splitlines() if "spec.data.sets." in line}
    assert done.returncode == 2 and sorted(told) == [f"{n}.train" for n in range(1, 7)], done.stderr
    assert "main/train, got main/test; correct ?split" in told["1.train"]
    assert "with the file absent.jsonl, got none in owner/name" in told["2.train"]
    assert "got none named nobody/name" in told["3.train"] and "got none named mirrored/name" in told["6.train"]
    assert "must name a split, ?split=train" in told["4.train"]
    assert "a hub reference must read hf://owner/name" in told["5.train"] and "model.path" not in done.stderr
    job["spec"]["data"] = {"train": sets["right"]}
    file.write_text(json.dumps(job))
    silent = run("http://127.0.0.1:1", tmp_path, "-m", "rl_core.cli.main", "validate", str(file))
    assert silent.returncode == 0 and "not checked: spec.model.path, spec.data.train: " in silent.stderr


@pytest.mark.parametrize(
    "reference",
    [
        "hf://nobody/name",
        "hf://name",
        "hf://owner/name/absent.jsonl",
        "hf://owner/name?split=train",
        "hf://owner/name?split=",
    ],
)
def test_what_cannot_be_fetched_is_a_configuration_error(endpoint, tmp_path, reference):
    done = fetch(endpoint, tmp_path, reference)
    assert done.returncode == 1 and "ConfigError" in done.stderr and reference.split("@")[0] in done.stderr
