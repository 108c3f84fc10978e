"""A rollout loop over a fake of the runner's lease calls."""

import asyncio
from contextlib import contextmanager

from rl_core.api.errors import WorkerLost
from rl_core.api.records import Completion, PromptGroupRecord
from rl_core.channel import Channel
from rl_core.messages.groups import PromptLease
from rl_core.rollouts.rollout_loop import POLL_SECONDS, RolloutLoop
from rl_core.runner.stall import Wait, explain
from rl_core.workers.context import WorkerContext


def lease(index, *, mode="train", version=1, rows=2, seconds=120.0):
    return PromptLease(
        mode=mode,
        group_id=f"g{index}",
        token=f"t{index}",
        sample={"idx": index},
        num_generations=rows,
        attempt=1,
        policy_version=version,
        temperature=None if mode == "train" else 0.0,
        lease_seconds=seconds,
    )


class FakeRunner:
    """The lease calls over what a test puts in; a poll waits until there is something, or the test ends it."""

    def __init__(self):
        self.pending, self.polls, self.renewed, self.given_back, self.stale = [], [], [], [], set()
        self.failed_samples = []
        self.failure, self.finished, self.unheard = None, [], 0
        self.refuses = False
        self.changed = asyncio.Condition()

    async def lease_groups(self, max_groups, timeout, version):
        assert timeout == POLL_SECONDS
        self.polls.append((max_groups, version))
        number = len(self.polls)
        async with self.changed:
            self.changed.notify_all()
            await self.changed.wait_for(
                lambda: self.pending or self.refuses or self.failure or number < len(self.polls)
            )
        if number < len(self.polls):  # the rollout asked again meanwhile
            return []
        if self.failure is not None:
            raise self.failure
        found, self.pending = self.pending[:max_groups], self.pending[max_groups:]
        return [one for one in found if one is not None]

    async def finish(self, entry):
        self.finished.append(entry)
        if self.unheard:
            self.unheard -= 1
            raise WorkerLost("the runner does not answer")

    async def renew(self, tokens):
        self.renewed.append(list(tokens))
        if self.failure is not None:
            raise self.failure
        return [token for token in tokens if token in self.stale]

    async def return_group(self, token, reason, message, failed=None):
        self.failed_samples.append(failed)
        self.given_back.append((token, reason, message))
        if self.failure is not None:
            raise self.failure

    async def put(self, *leases):
        async with self.changed:
            self.pending += leases
            self.changed.notify_all()

    async def end_poll(self):
        """Let the poll that waits end with nothing, as when its time is up."""
        await self.put(None)

    async def set(self, **state):
        async with self.changed:
            vars(self).update(state)
            self.changed.notify_all()


class Harness:
    def __init__(self):
        self.trajectories, self.validation = (Channel.create(name, local=True) for name in ("t", "v"))
        self.runner = FakeRunner()
        self.context = WorkerContext()
        self.waits, self.started, self.holds = [], [], {}
        self.version, self.limit, self.failure, self.now = 1, 100, None, 0.0
        self.loop = RolloutLoop(
            self.run,
            self.runner,
            row_limit=lambda: self.limit,
            group_rows=2,
            version=lambda: self.version,
            waiting=self.waiting,
            clock=lambda: self.now,
        )

    async def run(self, given):
        self.started.append(given.group_id)
        if given.group_id in self.holds:
            await self.holds[given.group_id].wait()
        if self.failure is not None:
            raise self.failure
        rewards = [0.5, float("nan")]
        completions = [
            Completion(message_log=[], reward=r, metrics={"gen_tokens": 3}, truncated=False) for r in rewards
        ]
        return PromptGroupRecord(
            prompt_idx=given.sample["idx"],
            prompt=[],
            extra_env_info=None,
            metadata={},
            completions=completions,
            group_id=given.group_id,
        )

    @contextmanager
    def waiting(self, what, on, cause):
        self.waits.append((what, on))
        with self.context.waiting(what, on, cause):
            yield

    def stall_reason(self):
        """Return the reason of a stall in which this rollout's heartbeat reports a wait and the runner waits for rollouts."""
        wait = self.context.heartbeat().wait
        own = Wait(who="rollout:0", on=wait.on, what=wait.what, since_seconds=wait.since_seconds, cause=wait.cause)
        return explain(
            [own, Wait(who="runner", on="rollout", what="generating", since_seconds=300.0)], [], ["rollout:0"]
        )[0]

    def hold(self, *indices):
        self.holds |= {f"g{index}": asyncio.Event() for index in indices}

    @staticmethod
    async def depth(channel):
        return (await asyncio.to_thread(channel.stats)).depth

    async def record(self, index):
        """Take the record of a group from the channel, where it is under its lease token."""
        return await self.trajectories.get_async(key=f"t{index}", timeout=60)

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0.001)

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    def start(self, *, gate=True):
        self.loop.start(self.trajectories, self.validation)
        if gate:
            self.loop.open()

    async def serving(self, *leases):
        self.start()
        await self.runner.put(*leases)
        await self.settle()
