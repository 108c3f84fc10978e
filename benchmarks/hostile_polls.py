"""How long the word of well-behaved runners is delayed while one in twenty is hostile; and the poller's memory. JSON on standard output.

    hostile_polls.py [RUNNERS [SECONDS]]

The operator's own poller and client, over HTTP to `_hostile_runners.py`: silent, endless, nested without end, a byte at a time,
full of small values.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
from _fake_api import MASTER
from _hostile_runners import kind_of

from rljob_operator.model import Progress
from rljob_operator.runtime.cache import JobKey
from rljob_operator.runtime.progress import JOBS_PER_SECOND, Poller, RunnerClient, RunnerTarget

INTERVAL = 5.0
SPREAD = 1.1
"""The longest interval of a job is so many times the interval: the poller spreads jobs over it."""


class Words:
    """The newest word of each runner, and when good ones came."""

    def __init__(self) -> None:
        self.known: dict[JobKey, Progress] = {}
        self.came: dict[int, list[float]] = {}
        self.errors: dict[str, int] = {}

    def report(self, key: JobKey, uid: str, progress: Progress) -> None:
        """Take a runner's word, or that it gave none."""
        self.known[key] = progress
        if progress.error:
            kind = kind_of(int(uid))
            self.errors[kind] = self.errors.get(kind, 0) + 1
        else:
            self.came.setdefault(int(uid), []).append(time.perf_counter())


async def poll(count: int, seconds: float) -> dict:
    """Poll for some time; delays beyond the interval, and memory."""
    words, process = Words(), psutil.Process()
    targets = [
        RunnerTarget(
            key=JobKey("bench", str(n)),
            job_uid=str(n),
            pod_uid=f"pod-{n}",
            ip=f"127.1.{n // 250}.{n % 250 + 1}",
            epoch=1,
        )
        for n in range(count)
    ]
    async with aiohttp.ClientSession() as session:
        poller = Poller(
            client=RunnerClient(master=lambda uid: MASTER, session=session),
            targets=lambda: targets,
            known=words.known.get,
            report=words.report,
            enqueue=lambda key: None,
            interval=INTERVAL,
        )
        begin = time.perf_counter()
        polling = asyncio.create_task(poller.run())
        memory = []
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            memory.append(round(process.memory_info().rss / 2**20, 1))
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    interval = max(INTERVAL, count / JOBS_PER_SECOND)
    end = begin + seconds
    good = [n for n in range(count) if kind_of(n) == "good"]
    delays = []
    for n in good:
        times = [begin, *words.came.get(n, []), end]
        delays.append(max(later - earlier for earlier, later in itertools.pairwise(times)) - interval * SPREAD)
    return {
        "runners": count,
        "hostile": count - len(good),
        "seconds": seconds,
        "interval_s": interval,
        "worst_delay_beyond_interval_s": round(max(0.0, *delays), 2),
        "allowed_s": interval,
        "answers": sum(len(times) for times in words.came.values()),
        "silent_good_runners": sum(1 for n in good if n not in words.came),
        "errors_by_kind": words.errors,
        "memory_mib": memory,
    }


def main() -> None:
    """Start the runners, poll, print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    command = [sys.executable, str(Path(__file__).with_name("_hostile_runners.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as runners:
        try:
            assert runners.stdout is not None
            runners.stdout.readline()
            result = asyncio.run(poll(count, float(seconds)))
        finally:
            runners.kill()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
