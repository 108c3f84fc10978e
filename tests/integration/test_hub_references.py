"""`hf://` references are fetched over HTTP from the endpoint, before anything starts (here: a local server)."""

import hashlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = {
    "config.json": b'{"architectures": ["Qwen2ForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
}
DATA = {"train.jsonl": b'{"prompt": "1+1=", "answer": "2"}\n'}


class Hub(BaseHTTPRequestHandler):
    """The few endpoints of a hub that a download needs."""

    def files(self):
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
        elif self.path.startswith("/api/") and "/nobody/" not in self.path:
            found = [{"rfilename": name} for name in self.files()]
            content = json.dumps(
                {"id": "owner/name", "sha": COMMIT, "siblings": found, "tags": [], "private": False}
            ).encode()
            self.answer(200, content, body)
        elif "/resolve/" in self.path and (name := self.path.rpartition("/")[2]) in self.files():
            self.answer(200, self.files()[name], body)
        else:
            self.answer(404, b"{}", body)

    def answer(self, code, content, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
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
    code = f"from rl_core.data.hub import fetch; print(fetch({reference!r}))"
    env = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "PATH": "/usr/bin",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)


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


@pytest.mark.parametrize("reference", ["hf://nobody/name", "hf://name", "hf://owner/name/absent.jsonl"])
def test_what_cannot_be_fetched_is_a_configuration_error(endpoint, tmp_path, reference):
    done = fetch(endpoint, tmp_path, reference)
    assert done.returncode == 1 and "ConfigError" in done.stderr and reference.split("@")[0] in done.stderr
