"""Namespaces divided between two releases of the chart: each operator serves its own, one definition serves both, and none of them
meets the other's jobs, rights, rules, keys or Lease."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from rljob_operator import kinds
from rljob_operator.runtime import leader, master_key
from rljob_operator.runtime.cluster import ApiCluster
from tests.cluster.operator_rig.charts import CHART, job
from tests.cluster.operator_rig.jobs import STANDARD, Jobs, until
from tests.cluster.operator_rig.replica import Replica, home_of
from tests.cluster.testcluster.access import Access


@dataclass
class Shard:
    """A release, the namespace that it serves, and its operator, which runs as the account that the release made."""

    release: str
    jobs: Jobs
    operator: Replica

    @property
    def account(self) -> str:
        return f"system:serviceaccount:{home_of(self.jobs.namespace)}:{self.release}-operator"


@pytest.fixture
async def shards(control_plane: Access) -> AsyncIterator[list[Shard]]:
    """Two releases; the first brings the definition, the second finds it."""
    made: list[Shard] = []
    async with control_plane.aio_client() as client:
        for release, first in (("rljob-a", True), ("rljob-b", False)):
            namespace = f"shard-{secrets.token_hex(3)}"
            control_plane.core.create_namespace({"metadata": {"name": namespace}})
            install(control_plane, "install", release, namespace, "--create-namespace", "--take-ownership", first=first)
            kubeconfig = control_plane.kubeconfig_of(f"{release}-operator", namespace=home_of(namespace))
            made.append(Shard(release, Jobs(ApiCluster(client), namespace), Replica(kubeconfig, namespace)))
        for shard in made:
            await shard.operator.start()
        yield made
        for shard in made:
            await shard.operator.stop()
            control_plane.helm("uninstall", shard.release, "-n", home_of(shard.jobs.namespace), check=False)
            for name in (shard.jobs.namespace, home_of(shard.jobs.namespace)):
                control_plane.kubectl("delete", "namespace", name, "--wait=false")


def install(access: Access, verb: str, release: str, namespace: str, *words: str, first: bool = False) -> None:
    """Install or upgrade a release without pods, which serves `namespace`."""
    values = ("replicas=0", f"watchNamespaces={{{namespace}}}", f"crds.install={str(first).lower()}")
    given = [word for value in values for word in ("--set", value)]
    access.helm(verb, release, CHART, "-n", home_of(namespace), *given, *words)


async def test_two_releases_share_the_definition_and_nothing_else(control_plane: Access, shards: list[Shard]) -> None:
    a, b = shards
    for shard in shards:
        await shard.jobs.create()
    for shard in shards:
        await shard.jobs.wait_pods(*STANDARD)
        await shard.operator.settle()
        sizes = shard.operator.operator.cache.sizes()
        assert (sizes["rljobs"], sizes["pods"]) == (1, len(STANDARD))

    homes = [home_of(shard.jobs.namespace) for shard in shards]
    leases = [await a.jobs.api.read(kinds.LEASE, home, leader.NAME) for home in homes]
    keys = [control_plane.core.read_namespaced_secret(master_key.NAME, home).data for home in homes]
    assert leases[0]["spec"]["holderIdentity"] != leases[1]["spec"]["holderIdentity"] and keys[0] != keys[1]
    right = ("auth", "can-i", "create", "pods", "-n", b.jobs.namespace)
    answers = [control_plane.kubectl(*right, f"--as={each.account}", check=False).stdout.strip() for each in (b, a)]
    assert answers == ["yes", "no"]

    before = a.operator.requests()
    await b.jobs.change({"rollout": {"replicas": 3}})
    await b.jobs.wait_pods(*STANDARD, "job-rollout-2")
    await b.operator.settle()
    await a.operator.settle()
    served = {key: n for key, n in a.operator.requests().items() if key[1] != "leases"}
    assert served == {key: n for key, n in before.items() if key[1] != "leases"}

    # An upgrade or the end of one release leaves the other's jobs and rules alone.
    words = ("--set", "policy.maxGpusPerJob=2")
    await asyncio.to_thread(install, control_plane, "upgrade", "rljob-b", b.jobs.namespace, *words)
    greedy = job("greedy", actor={"gpus": 8}, rollout={"maxReplicas": 2})

    async def refused() -> bool:
        return "devices of all pods must not exceed 2" in (await dry_run(control_plane, b, greedy))

    await until(refused, "the rule of the second release")
    assert await dry_run(control_plane, a, greedy) == ""

    await b.operator.stop()
    await asyncio.to_thread(control_plane.helm, "uninstall", "rljob-b", "-n", home_of(b.jobs.namespace))
    uid = await a.jobs.delete_pod("job-env-0")

    async def replaced() -> bool:
        pods = await a.jobs.pods()
        return "job-env-0" in pods and pods["job-env-0"]["metadata"]["uid"] != uid

    await until(replaced, "a new job-env-0")


async def dry_run(access: Access, shard: Shard, obj: dict) -> str:
    """Return why the API server refuses an object in a shard's namespace; empty when it takes it."""
    words = ("create", "--dry-run=server", "-n", shard.jobs.namespace, "-f", "-")
    answer = await asyncio.to_thread(access.kubectl, *words, stdin=json.dumps(obj), check=False)
    return answer.stderr if answer.returncode else ""
