"""The operator in the test's own loop, started, ended and counted."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes.aio import client, config

from rljob_operator.model import OperatorConfig
from rljob_operator.runtime.app import Operator
from rljob_operator.runtime.cluster import Cluster
from rljob_operator.runtime.settings import Settings
from tests.cluster.operator_rig.jobs import until

WRITES = ("POST", "PUT", "PATCH", "DELETE")
START = 180.0
LEASE_SECONDS = 60.0
"""A Lease that is not renewed for two thirds of it ends the operator: on a busy machine one request may take seconds."""


def home_of(namespace: str) -> str:
    """Return the namespace of the operator that serves `namespace`: it serves none of its own."""
    return f"{namespace}-op"


class Replica:
    """One operator process' worth, serving one namespace; `home_of` it must be there."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        *,
        wrap: Callable[[Cluster], Cluster] = lambda cluster: cluster,
        **settings: Any,
    ) -> None:
        async def configuration() -> client.Configuration:
            result = client.Configuration()
            await config.load_kube_config(config_file=str(kubeconfig), client_configuration=result)
            return result

        values: dict[str, Any] = {
            "config": OperatorConfig(namespace=home_of(namespace)),
            "watch_namespaces": (namespace,),
            "identity": f"replica-{id(self)}",
            "metrics_port": 0,
            "metrics_host": "127.0.0.1",
            "poll_seconds": 0.2,
            "progress_seconds": 1.0,
            "lease_seconds": LEASE_SECONDS,
        }
        self.operator = Operator(settings=Settings(**{**values, **settings}), configuration=configuration, wrap=wrap)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> "Replica":
        """Start, and return when the caches are filled and the watches run."""
        self.task = asyncio.create_task(self.operator.run(), name="operator")
        async with asyncio.timeout(START):
            while not self.operator.watching.is_set():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.02)
        return self

    async def stop(self) -> None:
        """End as SIGTERM does."""
        self.operator.stop()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)

    async def settle(self, *, quiet: float = 1.0) -> None:
        """Return when nothing was enqueued, handled or asked for so many seconds; the Lease does not count."""
        loop = asyncio.get_running_loop()
        since, before = loop.time(), self.requests()
        while loop.time() - since < quiet:
            now = {key: n for key, n in self.requests().items() if key[1] != "leases"}
            if now != before or not self.operator.queue.idle:
                since, before = loop.time(), now
            await asyncio.sleep(0.05)

    def requests(self) -> dict[tuple[str, str, str], int]:
        """Return the requests sent so far by (verb, resource, code)."""
        counts = {}
        for metric in self.operator.metrics.registry.collect():
            for sample in metric.samples if metric.name == "rljob_operator_api_requests" else ():
                if sample.name.endswith("_total"):
                    labels = sample.labels
                    counts[labels["verb"], labels["resource"], labels["code"]] = int(sample.value)
        return counts

    def writes(self) -> dict[tuple[str, str, str], int]:
        """Return the writes among them, but for the Lease's."""
        return {key: n for key, n in self.requests().items() if key[0] in WRITES and key[1] != "leases"}

    async def wait_watched(self, plural: str) -> None:
        """Return when a watch has brought an event of a resource."""

        async def came() -> bool:
            return self.watch_events(plural) > 0

        await until(came, f"an event of {plural}")

    def watch_events(self, plural: str) -> int:
        """Return how many events the watches of a resource have brought."""
        sample = self.operator.metrics.registry.get_sample_value
        return int(sample("rljob_operator_watch_events_total", {"resource": plural}) or 0)
