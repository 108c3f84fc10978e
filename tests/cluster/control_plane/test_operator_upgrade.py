"""Two versions of rljob after one another over one job: nobody is restarted, no running job gets another setting, workers of either
version read what the operator of the other one writes.

The later version is this tree with a field more and with another default, run as processes of its own.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rl_core.api import defaults, document
from rl_core.api.job import RLJobSpec
from rljob_operator import kinds
from tests.cluster.operator_rig.jobs import STANDARD, Jobs, until
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.runner import FakeRunner
from tests.e2e import later_version

READ = """
import pathlib, sys
from rl_core.runner.__main__ import read_job
print(read_job(pathlib.Path(sys.argv[1])).spec.algorithm.model_dump_json(by_alias=True))
"""


@pytest.fixture(scope="module")
def later(tmp_path_factory) -> Path:
    """The tree of the later version."""
    return later_version.build(tmp_path_factory.mktemp("later"))


class Versions:
    """The job's ConfigMap, and what workers of both versions make of it."""

    def __init__(self, jobs: Jobs, later: Path, folder: Path) -> None:
        self.jobs, self.trees, self.folder = jobs, {"this": later_version.ROOT, "later": later}, folder

    async def config_map(self) -> dict:
        return await self.jobs.api.read(kinds.CONFIG_MAP, self.jobs.namespace, "job-config")

    async def read_by(self, version: str) -> dict:
        """Let a worker's process of a version read the job; return its `algorithm`."""
        file = self.folder / "job.json"
        file.write_text((await self.config_map())["data"]["job.json"])
        tree = self.trees[version]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", READ, str(file)],
            env={**os.environ, "PYTHONPATH": str(tree)},
            cwd=tree,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def versions(jobs: Jobs, later: Path, tmp_path: Path) -> Versions:
    return Versions(jobs, later, tmp_path)


@pytest.fixture
async def runner(jobs: Jobs, kubelet: Kubelet) -> AsyncIterator[FakeRunner]:
    """The runner of the job, of this version: it takes signed calls alone."""
    address = kubelet.address("job-actor-0")
    async with FakeRunner(jobs, address=address, step=3, policyVersion=3, appliedGeneration=1) as runner:
        yield runner


async def accepted(jobs: Jobs) -> str:
    """Make the job, whose groupSize is the default of the operator that accepts it; return the version it is kept under."""
    await jobs.create(algorithm={"promptsPerStep": 8, "steps": 20, "groupSize": None})
    await jobs.wait_phase("Running")
    return (await jobs.get())["status"]["schemaVersion"]


async def restart_gang(jobs: Jobs, kubelet: Kubelet, runner: FakeRunner, epoch: int) -> None:
    """End actor-0 and wait until its gang runs under `epoch`."""
    await kubelet.end("job-actor-0", code=1)

    async def came() -> bool:
        return (await jobs.get())["status"].get("epoch") == epoch

    await until(came, f"epoch {epoch}")
    runner.status["epoch"] = epoch
    await jobs.wait_pods(*STANDARD)
    await jobs.wait_phase("Running")


async def suspend(jobs: Jobs, kubelet: Kubelet, runner: FakeRunner) -> None:
    """Suspend the job: its runner is asked to save, and ends."""
    await jobs.change({"suspend": True})
    await until(lambda: told(runner, 1, "POST /finish"), "POST /finish")
    await kubelet.end("job-actor-0", code=0)
    await jobs.wait_phase("Suspended")


async def resume(jobs: Jobs, runner: FakeRunner, *, epoch: int) -> None:
    """Let the job, scaled to one rollout, go on under `epoch`."""
    runner.status |= {"epoch": epoch, "appliedGeneration": 4}
    await jobs.change({"suspend": False})
    await jobs.wait_pods(*STANDARD[:2], "job-env-0")
    await jobs.wait_phase("Running")


async def test_a_job_goes_through_an_upgrade_and_back_as_it_was_accepted(
    jobs: Jobs, start, process, kubelet: Kubelet, versions: Versions, runner: FakeRunner
) -> None:
    this = await start()
    schema = await accepted(jobs)
    await this.settle()
    await this.stop()
    before = await versions.config_map()
    uids = {name: pod["metadata"]["uid"] for name, pod in (await jobs.pods()).items()}
    assert schema == defaults.present().version

    operator, _ = process("later", root=versions.trees["later"])
    await restart_gang(jobs, kubelet, runner, 2)
    assert (await versions.config_map())["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    pods = await jobs.pods()
    assert {n: p["metadata"]["uid"] for n, p in pods.items() if "actor" not in n} == {
        name: uid for name, uid in uids.items() if "actor" not in name
    }
    await jobs.change({"rollout": {"replicas": 1}})  # an edit, which the later version writes down in its words
    await until(lambda: told(runner, 2), "PUT /control")
    (spec,) = {document.text(asked_spec(body)) for body in runner.told("PUT /control")}
    assert '"groupSize": 8' in spec
    rewritten = await versions.config_map()
    assert rewritten["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]
    assert '"laterField":3' in rewritten["data"]["job.json"]
    for version in ("this", "later"):
        assert (await versions.read_by(version))["groupSize"] == 8
    runner.status["appliedGeneration"] = 2
    await suspend(jobs, kubelet, runner)
    operator.terminate()
    operator.wait()

    back = await start()
    await resume(jobs, runner, epoch=3)
    await back.settle()
    assert (await jobs.get())["status"]["schemaVersion"] == schema
    assert (await versions.read_by("later"))["groupSize"] == 8
    assert await jobs.events("DefaultsLost") == []


async def test_a_job_of_the_later_version_keeps_its_defaults_when_the_operator_is_rolled_back(
    jobs: Jobs, start, process, kubelet: Kubelet, versions: Versions, runner: FakeRunner
) -> None:
    operator, _ = process("later", root=versions.trees["later"])
    schema = await accepted(jobs)
    operator.terminate()
    operator.wait()
    before = await versions.config_map()
    assert schema != defaults.present().version
    assert (await versions.read_by("this"))["groupSize"] == 16

    this = await start()
    await restart_gang(jobs, kubelet, runner, 2)
    await this.settle()
    assert (await versions.config_map())["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    await jobs.change({"rollout": {"replicas": 1}})
    await until(lambda: told(runner, 2), "PUT /control")
    assert asked_spec(runner.told("PUT /control")[-1]).algorithm.group_size == 16
    runner.status["appliedGeneration"] = 2
    await suspend(jobs, kubelet, runner)
    await resume(jobs, runner, epoch=3)
    assert (await versions.read_by("later"))["groupSize"] == 16
    assert (await jobs.get())["status"]["schemaVersion"] == schema


async def told(runner: FakeRunner, generation: int, call: str = "PUT /control") -> bool:
    """Whether the runner was told of a generation, or got so many calls of another kind."""
    bodies = runner.told(call)
    return (
        any(body["generation"] == generation for body in bodies)
        if call == "PUT /control"
        else len(bodies) >= generation
    )


def asked_spec(body: dict) -> RLJobSpec:
    """What the runner of this version understands."""
    return document.read(RLJobSpec, body["spec"])
