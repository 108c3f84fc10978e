"""`rljob samples JOB` from the command line to a real control port, by the protocol of port-forwards through an API server."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress

import aiohttp
import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from rl_core.api.errors import ConfigError, InfrastructureError
from rl_core.cli.main import app
from rl_core.cli.targets import Place
from rl_core.plan.signatures import Peer
from rl_core.runner.control import ControlServer
from rl_core.runner.output_files import OutputFiles
from rljob_operator.cli.targets import Targets
from tests.unit.view.run_folder import make_run

UID = "0123abcd-0000"
TOKEN = "the token of the job"
API = "/api/v1/namespaces/team"


class ApiServer:
    """An API server with one job, its pod, its Secret, and port-forwards of the pod to a runner; objects that are None do not exist."""

    def __init__(self, folder):
        """`folder`: the output folder of the job."""
        self.folder = folder
        self.runner = None
        self.serve(epoch=3)
        labels = {"rljob.dev/job": "add", "rljob.dev/job-uid": UID, "rljob.dev/epoch": "3"}
        self.job = {"metadata": {"name": "add", "uid": UID}, "status": {"phase": "Running"}}
        self.pod = {"metadata": {"name": "add-actor-0", "labels": labels}, "status": {"phase": "Running"}}
        self.secret = {"data": {"control.token": base64.b64encode(TOKEN.encode()).decode()}}
        self.forwarded = []
        """Ports that were asked for."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._run(self._start())}"

    def serve(self, *, epoch):
        """Replace the runner by one of `epoch`."""
        if self.runner is not None:
            self.runner.close()
        peer = Peer(token=TOKEN, uid=UID, epoch=epoch)
        files = {"POST /files": OutputFiles(self.folder, limit=500).read}
        self.runner = ControlServer("127.0.0.1", 0, peer=peer, status=lambda: {"epoch": epoch}, actions=files)

    def close(self):
        self._run(self._web.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.runner.close()

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self):
        served = web.Application()
        for path, kind in {
            "/apis/rljob.dev/v1alpha1/namespaces/team/rljobs/add": "job",
            f"{API}/pods/add-actor-0": "pod",
            f"{API}/secrets/add-keys-0123abcd": "secret",
        }.items():
            served.router.add_get(path, lambda request, kind=kind: self._object(kind))
        served.router.add_get(f"{API}/pods/add-actor-0/portforward", self._forward)
        self._web = web.AppRunner(served, access_log=None)
        await self._web.setup()
        site = web.TCPSite(self._web, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _object(self, kind):
        found = getattr(self, kind)
        if found is None:
            message = f'{kind}s "add" not found'
            return web.json_response({"kind": "Status", "message": message, "reason": "NotFound"}, status=404)
        return web.json_response(found)

    async def _forward(self, request):
        """Forward as v4.channel.k8s.io: channel 0 carries data, channel 1 errors; each begins with the port, little-endian."""
        port = int(request.query["ports"])
        self.forwarded.append(port)
        answer = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await answer.prepare(request)
        for channel in (0, 1):
            await answer.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.runner.port)

        async def back():
            with suppress(ConnectionError):
                while data := await reader.read(4096):
                    await answer.send_bytes(b"\0" + data)
            await answer.close()

        answering = asyncio.create_task(back())
        async for message in answer:
            if message.type == aiohttp.WSMsgType.BINARY and message.data[0] == 0:
                writer.write(message.data[1:])
        writer.close()
        await answering
        return answer


@pytest.fixture
def api(tmp_path, monkeypatch):
    found = ApiServer(make_run(tmp_path / "out"))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": "team"}}],
        "clusters": [{"name": "it", "cluster": {"server": found.url}}],
        "users": [{"name": "it", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.chdir(tmp_path)
    yield found
    found.close()


def rljob(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_the_samples_of_a_running_job_are_those_of_its_output_folder(api):
    shown = rljob("samples", "add")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == rljob("samples", str(api.folder)).stdout
    assert len(api.forwarded) > 2 and set(api.forwarded) == {7702}


def test_a_job_without_a_runner_says_where_its_files_are(api):
    api.pod["status"]["phase"], api.job["status"]["phase"] = "Succeeded", "Succeeded"
    ended = rljob("samples", "add")
    assert ended.exit_code == 2
    assert all(words in ended.stderr for words in ("the job is Succeeded", "folder add-0123abcd", "docs/running.md"))
    api.pod = None
    assert "got none: the job is Succeeded" in rljob("samples", "add").stderr


def test_a_job_that_does_not_exist_is_told_as_by_other_commands(api):
    api.job = None
    assert rljob("samples", "add").exit_code == 2


def test_with_the_token_of_another_job_nothing_is_read(api):
    api.secret = {"data": {"control.token": base64.b64encode(b"another").decode()}}
    refused = rljob("samples", "add")
    assert refused.exit_code == 3 and "must answer GET /status" in refused.stderr


def test_after_a_restart_the_runner_of_the_new_epoch_is_asked(api):
    ask, body = Targets().files("add", Place()), {"have": {}, "folders": [""]}
    assert ask(body)[0] == {"epoch": 3}
    api.serve(epoch=4)
    pod, api.pod = api.pod, None
    with pytest.raises(InfrastructureError, match="this is the runner of job .*, epoch 4"):
        ask(body)
    with pytest.raises(ConfigError, match="must have a runner"):
        ask(body)
    pod["metadata"]["labels"]["rljob.dev/epoch"], api.pod = "4", pod
    assert ask(body)[0] == {"epoch": 4}


def test_the_page_of_a_running_job_is_served_from_a_copy_that_is_deleted_at_the_end(api, tmp_path):
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "rl_core.cli.main", "view", "add", "--no-browser"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    try:
        url = process.stdout.readline().split()[0]
        runs = json.loads(urllib.request.urlopen(f"{url}api/runs", timeout=30).read())
        steps = json.loads(urllib.request.urlopen(f"{url}api/steps?run=0", timeout=30).read())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert (runs[0]["name"], runs[0]["epoch"], steps["train"]) == ("add", 3, [1, 2, 3])
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("command", ["samples", "view", "status", "logs"])
def test_a_folder_that_is_misspelt_is_told_where_there_is_no_cluster(command, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    told = CliRunner().invoke(app, [command, "owt"])
    assert told.exit_code == 2 and "owt is no folder here, and for a job of that name a kubeconfig must" in told.stderr
