"""Keeps the network policies of a deleted job until its pods have ended.

The garbage collector deletes all objects of a deleted job at the same time, in any order. A pod may run on for its grace period, in which it
would be open to all, and an environment could reach the metadata service of the cloud. The operator therefore makes the remaining pods the
owners of the policies that fence them, in place of the job: the garbage collector deletes a policy together with the last of its pods. A
policy that it has deleted already is made again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rl_core.api.job import RLJob
from rljob_operator import kinds
from rljob_operator.errors import Forbidden, Invalid, NotFound
from rljob_operator.manifests import network
from rljob_operator.model import Object, OperatorConfig, PodView
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.cluster import Cluster

logger = logging.getLogger(__name__)


class DeletedJobs:
    """Fences the remaining pods of deleted jobs."""

    def __init__(self, *, cluster: Cluster, cache: Cache, config: OperatorConfig) -> None:
        self._cluster = cluster
        self._cache = cache
        self._config = config

    async def fence(self, key: JobKey, job: RLJob) -> bool:
        """Give the policies of a deleted job to its remaining pods. Return whether there are any such pods."""
        pods = [pod for pod in self._cache.children(kinds.POD, key) if pod.job_uid == job.metadata.uid]
        await asyncio.gather(*(self._give(key, policy) for policy in self._policies(key, job, pods)))
        return bool(pods)

    def _policies(self, key: JobKey, job: RLJob, pods: Sequence[PodView]) -> list[Object]:
        """Return the policies to write: those that do not exist, and those that still belong to the job."""
        policies: list[Object] = []
        for policy in network.of_remaining_pods(job, pods, config=self._config):
            cached = self._cache.entry(kinds.NETWORK_POLICY, key, policy["metadata"]["name"])
            owners = cached.value["metadata"].get("ownerReferences") or [] if cached is not None else []
            if not owners or any(owner["kind"] == kinds.RLJOB.kind for owner in owners):
                policies.append(policy)
        return policies

    async def _give(self, key: JobKey, policy: Object) -> None:
        name = policy["metadata"]["name"]
        try:
            answer = await self._cluster.apply(kinds.NETWORK_POLICY, key.namespace, name, policy)
        # The chart is an earlier one, or the namespace is being deleted.
        except (Forbidden, Invalid, NotFound) as error:
            logger.warning("NetworkPolicy %s of a deleted job was not kept for its pods: %s", name, error.message)
        else:
            self._cache.put(kinds.NETWORK_POLICY, answer)
