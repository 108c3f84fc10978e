"""What /metrics, /healthz and /readyz say."""

import asyncio
import threading

import aiohttp
import pytest
from prometheus_client.registry import Collector

from rljob_operator import kinds
from rljob_operator.runtime import metrics
from rljob_operator.runtime.cache import Cache
from rljob_operator.runtime.health import Health
from rljob_operator.runtime.metrics import Metrics


def job(name, **status):
    return {"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1"}, "status": status}


@pytest.fixture
async def bench():
    class Bench:
        metrics, cache, why = Metrics(), Cache(), [""]

        async def get(self, path):
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{health.port}{path}") as response,
            ):
                return response.status, await response.text()

    Bench.metrics.watch_cache(Bench.cache)
    health = Health(metrics=Bench.metrics, ready=lambda: Bench.why[0])
    await health.start(host="127.0.0.1", port=0)
    Bench.health = health
    yield Bench()
    await health.stop()


async def test_readiness_says_why_not(bench):
    assert await bench.get("/readyz") == (200, "ok\n")
    bench.why[0] = "the cache is not filled yet"
    assert await bench.get("/readyz") == (503, "the cache is not filled yet\n")


async def test_liveness_fails_when_the_loop_is_late(bench):
    assert (await bench.get("/healthz"))[0] == 200
    bench.health._beat -= 30.0
    status, words = await bench.get("/healthz")
    assert status == 503 and "late" in words


async def test_the_jobs_are_in_the_metrics(bench):
    bench.cache.put(kinds.RLJOB, job("a", phase="Running", step=7, restarts=2, reward=0.5, lag=1))
    bench.cache.put(kinds.RLJOB, job("b", phase="Failed"))
    bench.cache.put(kinds.RLJOB, job("c"))
    waits = [{"name": "rollout/busy_share", "value": "0.75"}, {"name": "actor/starved_seconds", "value": "2.5"}]
    waits += [{"name": "rollout/tokens_per_second", "value": "1234"}, {"name": "mismatch/kl", "value": "0.004"}]
    odd = [{"name": "rollout/queue_depth", "value": "many"}, {"value": "1"}, {"name": "train/loss", "value": "1"}]
    bench.cache.put(kinds.RLJOB, job("d", phase="Running", metrics=odd + waits))
    bench.cache.put(kinds.RLJOB, job("e", phase="Succeeded", metrics=waits))
    _, text = await bench.get("/metrics")
    for line in (
        'rljob_jobs{phase="Running"} 2.0',
        'rljob_rollout_busy_ratio{name="d",namespace="ns"} 0.75',
        'rljob_actor_starved_seconds{name="d",namespace="ns"} 2.5',
        'rljob_rollout_tokens_per_second{name="d",namespace="ns"} 1234.0',
        'rljob_mismatch_kl{name="d",namespace="ns"} 0.004',
        'rljob_jobs{phase="Failed"} 1.0',
        'rljob_jobs{phase="Pending"} 1.0',
        'rljob_step{name="a",namespace="ns"} 7.0',
        'rljob_restarts{name="a",namespace="ns"} 2.0',
        'rljob_operator_cache_objects{resource="rljobs"} 5.0',
    ):
        assert line in text


async def test_a_scrape_of_many_jobs_does_not_block_the_loop(bench):
    """A family that takes until the loop has served another request."""
    served, slow = threading.Event(), []

    class Slow(Collector):
        def collect(self):
            slow.append(served.wait(20))
            return []

    bench.metrics.registry.register(Slow())
    scrapes = [asyncio.create_task(bench.get("/metrics")) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert await bench.get("/readyz") == (200, "ok\n")
    served.set()
    assert [status for status, _ in await asyncio.gather(*scrapes)] == [200, 200]
    assert slow == [True, True]


async def test_every_metric_of_the_table_is_there_and_no_other(bench):
    bench.metrics.watch_queue(lambda: 0, lambda: 0)
    bench.cache.put(kinds.RLJOB, job("a", phase="Running", step=7, restarts=2, reward=0.5, lag=1))
    families = {f"{m.name}_total" if m.type == "counter" else m.name for m in bench.metrics.registry.collect()}
    table = {
        line.split("|")[1].strip().split("{")[0] for line in metrics.__doc__.splitlines() if line.startswith("| rljob")
    }
    assert families == table


def test_a_step_grows_old_until_it_changes():
    now, cache, held = [1000.0], Cache(), Metrics()
    collector = metrics.JobCollector(cache, held.time_to_ready, clock=lambda: now[0])

    def age():
        collector.look()
        family = next(m for m in collector.collect() if m.name == "rljob_step_age_seconds")
        return [sample.value for sample in family.samples]

    cache.put(kinds.RLJOB, job("a", phase="Running", step=1))
    assert age() == [0.0]
    now[0] += 30
    assert age() == [30.0]
    changed = job("a", phase="Running", step=2)
    changed["metadata"]["resourceVersion"] = "2"
    cache.put(kinds.RLJOB, changed)
    assert age() == [0.0]


async def test_the_loops_lag_is_measured(bench):
    beating = asyncio.create_task(bench.health.run())
    await asyncio.sleep(0)
    assert bench.metrics.registry.get_sample_value("rljob_operator_loop_lag_seconds") == 0.0
    beating.cancel()
