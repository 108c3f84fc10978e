"""The operator's metrics, as Prometheus reads them on /metrics.

| name | type | meaning |
| --- | --- | --- |
| rljob_operator_queue_depth | gauge | jobs waiting for a worker |
| rljob_operator_queue_delayed | gauge | jobs waiting for a time |
| rljob_operator_queue_adds_total | counter | jobs put into the queue |
| rljob_operator_queue_retries_total | counter | reconciles that failed and are repeated |
| rljob_operator_queue_latency_seconds | histogram | time from adding a job to the queue until a worker takes it |
| rljob_operator_reconcile_total{result} | counter | reconciles of a job, by result: success or error |
| rljob_operator_reconcile_seconds | histogram | duration of one reconcile |
| rljob_operator_api_requests_total{verb,resource,code} | counter | requests to the API server |
| rljob_operator_api_request_seconds{verb} | histogram | duration of the requests |
| rljob_operator_watch_restarts_total{resource} | counter | watches that began anew with a list |
| rljob_operator_watch_events_total{resource} | counter | watch events |
| rljob_operator_cache_objects{resource} | gauge | objects held |
| rljob_operator_events_dropped_total | counter | Kubernetes events not written |
| rljob_operator_leader | gauge | 1 while this replica holds the Lease |
| rljob_operator_loop_lag_seconds | gauge | how late the event loop last was |
| rljob_jobs{phase} | gauge | jobs by phase |
| rljob_time_to_ready_seconds | histogram | job created to Ready, as this process saw it |
| rljob_restarts{namespace,name} | gauge | counted restarts of a job |
| rljob_step{namespace,name} | gauge | its step |
| rljob_step_age_seconds{namespace,name} | gauge | since its step last changed, as this process saw it |
| rljob_reward{namespace,name} | gauge | its mean reward |
| rljob_weight_lag{namespace,name} | gauge | versions the slowest rollout is behind |
| rljob_rollout_busy_ratio{namespace,name} | gauge | share of the last minute (of four steps, if longer) in which a rollout held groups, mean |
| rljob_rollout_starved_ratio{namespace,name} | gauge | the same, had none as no lease was admissible |
| rljob_actor_starved_ratio{namespace,name} | gauge | the same, the trainer waited for groups |
| rljob_rollout_starved_seconds{namespace,name} | gauge | seconds of the last step that a rollout had no group, mean |
| rljob_actor_starved_seconds{namespace,name} | gauge | seconds of the last step that the trainer waited for groups |
| rljob_rollout_queue_depth{namespace,name} | gauge | groups that could be leased and are not, mean of the last step |
| rljob_actor_queue_depth{namespace,name} | gauge | finished groups that are deferred, mean of the last step |
| rljob_rollout_tokens_per_second{namespace,name} | gauge | tokens that the engines of all rollouts generate |
| rljob_rollout_running{namespace,name} | gauge | rows that generate, in all engines |
| rljob_rollout_waiting{namespace,name} | gauge | rows that wait for a place in an engine |
| rljob_rollout_kv_use_ratio{namespace,name} | gauge | share of the memory for keys and values in use, of the fullest engine |
| rljob_rollout_queue_seconds{namespace,name} | gauge | how long a row waited for a place, of the slowest engine; SGLang does not tell |
| rljob_rollout_prefix_hit_ratio{namespace,name} | gauge | share of prompt tokens computed before; absent for an engine without prefix cache |
| rljob_mismatch_kl{namespace,name} | gauge | KL between engine and trainer on the same tokens, of the last step that measured it |
| rljob_mismatch_max_ratio{namespace,name} | gauge | largest ratio of their probabilities of a token |

Metrics about waiting, generation and mismatch exist only while the job runs. Metrics of jobs have the job's name as a label; they are
computed at each scrape, in a thread: with thousands of jobs that takes more than a second, in which the event loop must serve jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.times import to_seconds

PREFIX = "rljob_operator_"
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WORKLOAD = {
    "rollout/busy_share": ("rljob_rollout_busy_ratio", "Share of time in which a rollout held groups"),
    "rollout/starved_share": ("rljob_rollout_starved_ratio", "Share of time in which a rollout could hold none"),
    "actor/starved_share": ("rljob_actor_starved_ratio", "Share of time in which the trainer waited for groups"),
    "rollout/starved_seconds": ("rljob_rollout_starved_seconds", "Seconds of the step without a group to generate"),
    "actor/starved_seconds": ("rljob_actor_starved_seconds", "Seconds of the step without a group to train"),
    "rollout/queue_depth": ("rljob_rollout_queue_depth", "Groups that no rollout takes"),
    "actor/queue_depth": ("rljob_actor_queue_depth", "Groups that wait for the trainer"),
    "rollout/tokens_per_second": ("rljob_rollout_tokens_per_second", "Tokens that all rollouts generate"),
    "rollout/running": ("rljob_rollout_running", "Rows that generate"),
    "rollout/waiting": ("rljob_rollout_waiting", "Rows that wait for a place in an engine"),
    "rollout/kv_use": ("rljob_rollout_kv_use_ratio", "Memory for keys and values in use, of the fullest engine"),
    "rollout/queue_seconds": ("rljob_rollout_queue_seconds", "How long a row waited for a place"),
    "rollout/prefix_hit_share": ("rljob_rollout_prefix_hit_ratio", "Prompt tokens that were computed before"),
    "mismatch/kl": ("rljob_mismatch_kl", "KL between engine and trainer"),
    "mismatch/max_ratio": ("rljob_mismatch_max_ratio", "Largest probability ratio of a token"),
}
"""Families made of `status.metrics`, by the name there."""
SLOW = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Metrics:
    """Counts events of the queue, the API client, the watches and the leadership. Implements `QueueObserver` and `cluster.Observer`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._jobs: JobCollector | None = None
        self._scraping = asyncio.Lock()
        self._adds = self._counter("queue_adds", "Jobs put into the queue")
        self._retries = self._counter("queue_retries", "Looks that failed and are repeated")
        self._latency = self._histogram("queue_latency_seconds", "From put to taken", FAST)
        self._reconciles = self._counter("reconcile", "Looks at a job", ("result",))
        self._reconcile_seconds = self._histogram("reconcile_seconds", "How long a look took", FAST)
        self._requests = self._counter("api_requests", "Requests to the API server", ("verb", "resource", "code"))
        self._request_seconds = self._histogram("api_request_seconds", "How long they took", FAST, ("verb",))
        self._watch_restarts = self._counter("watch_restarts", "Watches that began anew", ("resource",))
        self._watch_events = self._counter("watch_events", "Watch events", ("resource",))
        self._events_dropped = self._counter("events_dropped", "Kubernetes events not written")
        self._leader = Gauge(PREFIX + "leader", "1 while this replica holds the Lease", registry=self.registry)
        self.loop_lag = Gauge(PREFIX + "loop_lag_seconds", "How late the event loop last was", registry=self.registry)
        self.time_to_ready = Histogram(
            "rljob_time_to_ready_seconds", "Job created to Ready", buckets=SLOW, registry=self.registry
        )

    def added(self) -> None:
        """See queue.QueueObserver."""
        self._adds.inc()

    def started(self, waited: float) -> None:
        """See queue.QueueObserver."""
        self._latency.observe(waited)

    def finished(self, seconds: float, result: str) -> None:
        """See queue.QueueObserver."""
        self._reconciles.labels(result).inc()
        self._reconcile_seconds.observe(seconds)

    def retried(self) -> None:
        """See queue.QueueObserver."""
        self._retries.inc()

    def requested(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """Count one request to the API server."""
        self._requests.labels(verb, resource, code).inc()
        self._request_seconds.labels(verb).observe(seconds)

    def watched(self, resource: str, *, anew: bool) -> None:
        """Count one watch event, or the beginning of a watch."""
        (self._watch_restarts if anew else self._watch_events).labels(resource).inc()

    def event_dropped(self) -> None:
        """Count a Kubernetes event that was not written."""
        self._events_dropped.inc()

    def led(self, leading: bool) -> None:
        """Record whether this replica holds the Lease."""
        self._leader.set(1.0 if leading else 0.0)

    def watch_queue(self, depth: Callable[[], int], delayed: Callable[[], int]) -> None:
        """Report the lengths of the queue at each scrape."""
        Gauge(PREFIX + "queue_depth", "Jobs waiting for a worker", registry=self.registry).set_function(depth)
        Gauge(PREFIX + "queue_delayed", "Jobs waiting for a time", registry=self.registry).set_function(delayed)

    def watch_cache(self, cache: Cache) -> None:
        """Report the sizes of the cache and the figures in the jobs' statuses at each scrape."""
        self._jobs = JobCollector(cache, self.time_to_ready)
        self.registry.register(self._jobs)

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format. Scrapes at the same time wait for each other."""
        async with self._scraping:
            if self._jobs is not None:
                self._jobs.look()
            return await asyncio.to_thread(generate_latest, self.registry)

    def _counter(self, name: str, description: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(PREFIX + name, description, labels, registry=self.registry)

    def _histogram(
        self, name: str, description: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(PREFIX + name, description, labels, buckets=buckets, registry=self.registry)


class JobCollector(Collector):
    """Computes the metrics of jobs from their statuses. `look` is called on the event loop, `collect` in the thread of the scrape."""

    def __init__(self, cache: Cache, time_to_ready: Histogram, *, clock: Callable[[], float] = time.time) -> None:
        self._cache = cache
        self._time_to_ready = time_to_ready
        self._clock = clock
        self._start = clock()
        self._sizes: Mapping[str, int] = {}
        self._last_jobs: Mapping[JobKey, Mapping[str, Any]] = {}
        """The jobs as the last `look` found them."""
        self._steps: dict[JobKey, tuple[int, float]] = {}
        """Step last seen and when it was first seen."""
        self._ready: set[str] = set()
        """uids whose time to ready is counted."""

    def look(self) -> None:
        """Take the jobs out of the cache, which only the event loop may read. The objects themselves are never changed."""
        self._sizes = self._cache.sizes()
        self._last_jobs = {key: job for key in self._cache.jobs() if (job := self._cache.job(key)) is not None}

    def collect(self) -> Iterator[Metric]:
        """Yield the families of cache sizes and of jobs, as of the last `look`."""
        jobs = self._last_jobs
        sizes = GaugeMetricFamily(PREFIX + "cache_objects", "Objects held", labels=["resource"])
        for resource, size in self._sizes.items():
            sizes.add_metric([resource], size)
        yield sizes
        phases = GaugeMetricFamily("rljob_jobs", "Jobs by phase", labels=["phase"])
        for phase, count in Tally((job.get("status") or {}).get("phase", "Pending") for job in jobs.values()).items():
            phases.add_metric([phase], count)
        yield phases
        yield from self._per_job(jobs)

    def _per_job(self, jobs: Mapping[JobKey, Mapping[str, Any]]) -> Iterator[Metric]:
        families = {
            "restarts": GaugeMetricFamily("rljob_restarts", "Counted restarts", labels=["namespace", "name"]),
            "step": GaugeMetricFamily("rljob_step", "Step", labels=["namespace", "name"]),
            "reward": GaugeMetricFamily("rljob_reward", "Mean reward", labels=["namespace", "name"]),
            "lag": GaugeMetricFamily("rljob_weight_lag", "Versions behind", labels=["namespace", "name"]),
        }
        shares = {
            metric: GaugeMetricFamily(name, description, labels=["namespace", "name"])
            for metric, (name, description) in WORKLOAD.items()
        }
        ages = GaugeMetricFamily("rljob_step_age_seconds", "Since the step changed", labels=["namespace", "name"])
        for key, job in jobs.items():
            status = job.get("status") or {}
            for field, family in families.items():
                if isinstance(value := status.get(field), int | float):
                    family.add_metric([key.namespace, key.name], value)
            if status.get("phase") == "Running":
                ages.add_metric([key.namespace, key.name], self._step_age(key, int(status.get("step") or 0)))
                for metric, value in _numbers(status.get("metrics") or []):
                    if metric in shares:
                        shares[metric].add_metric([key.namespace, key.name], value)
            self._count_ready(job)
        self._steps = {key: seen for key, seen in self._steps.items() if key in jobs}
        self._ready &= {job["metadata"]["uid"] for job in jobs.values()}
        yield from (*families.values(), *shares.values(), ages)

    def _step_age(self, key: JobKey, step: int) -> float:
        now = self._clock()
        last_step, since = self._steps.get(key, (-1, now))
        if last_step != step:
            since = now
        self._steps[key] = (step, since)
        return now - since

    def _count_ready(self, job: Mapping[str, Any]) -> None:
        """Observe the time to Ready once per job, from the condition's own times."""
        uid = job["metadata"]["uid"]
        ready = next((c for c in (job.get("status") or {}).get("conditions") or [] if c.get("type") == "Ready"), None)
        if ready is None or ready.get("status") != "True" or uid in self._ready:
            return
        self._ready.add(uid)
        ready_at, created = (
            to_seconds(ready.get("lastTransitionTime")),
            to_seconds(job["metadata"].get("creationTimestamp")),
        )
        if ready_at is not None and created is not None and ready_at >= self._start:
            self._time_to_ready.observe(ready_at - created)


def _numbers(metrics: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the numeric entries of `status.metrics`. Invalid entries are left out, so that they do not make the scrape fail."""
    for metric in metrics:
        with suppress(KeyError, TypeError, ValueError):
            yield str(metric["name"]), float(metric["value"])
