"""What control costs the runner: processor time and bytes, with synthetic members and no sockets. Prints JSON.

    python benchmarks/control_cost.py [--rollouts 64 256 512 1000] [--sizes 64x512 256x1024 1000x4096] [--steps N]

step: leasing, finishing and acknowledging the groups of one training step by the real dispatcher and ledger, on policy and one version
ahead; every rollout keeps a poll open as a real one does. `limit_seconds` is the same traffic through plain deques and dicts.

sync: one weight sync over all rollouts. Each rollout reports `updating`, the new version and `serving`, as real ones do; then each member
sends one more heartbeat. Counted are the heartbeats' processing, and the views that answer them, encoded as they travel.
"""

import argparse
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.groups import GroupEntry, PromptLease
from rl_core.messages.members import (
    WIRE_VERSION,
    Heartbeat,
    HeartbeatAnswer,
    HelloReport,
    MemberId,
    MemberState,
    MemberView,
)
from rl_core.plan.groups import ACTOR, BUILT_IN, ENV, ROLLOUT
from rl_core.runner.admission import Bounded, OnPolicy
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.step_groups import StepGroups
from rl_core.runner.training_account import TrainingAccount
from rl_core.runner.workload import Workload
from rl_core.transports import frames
from rl_core.workers.hub import visible_groups
from rl_core.workers.membership import Membership

ACTORS, ENVS, DATA_RANKS = 8, 16, 4


@dataclass(slots=True)
class Cost:
    """What a part of control took."""

    processor_seconds: float = 0.0
    bytes: int = 0
    messages: int = 0


class Members:
    """The members of a job at a hub's table, as they are in the middle of a run."""

    def __init__(self, rollouts: int) -> None:
        self.table = Membership(uid="u", epoch=0, views=visible_groups(BUILT_IN.values()), suspect_seconds=1e6)
        self.version = {ROLLOUT: 0}
        self.seen: dict[str, int] = {}
        """View version that each member took in last."""
        for group, size in ((ACTOR, ACTORS), (ENV, ENVS), (ROLLOUT, rollouts)):
            for rank in range(size):
                self._join(group, rank)
        self.table.take_changes()
        for name in list(self.seen):
            self.beat(name, MemberState.SERVING if name.startswith(ROLLOUT) else MemberState.READY)

    def _join(self, group: str, rank: int) -> None:
        member = MemberView(
            name=f"{group}:{rank}",
            role=group,
            group=group,
            rank=rank,
            pod=f"a-job-of-usual-name-{group}-{rank}",
            address=f"tcp://10.0.{rank // 250}.{rank % 250}:40123",
            pid=42,
            host_token="0123456789abcdef0123456789abcdef",
            incarnation=(0, 0),
        )
        assert (
            self.table.hello(HelloReport(wire_version=WIRE_VERSION, uid="u", epoch=0, member=member, registration=1))
            is None
        )
        self.seen[member.name] = self.table.view(group).version

    def beat(self, name: str, state: MemberState, version: int | None = 0) -> HeartbeatAnswer:
        """Send one heartbeat and take its answer in."""
        beat = Heartbeat(
            state=state,
            policy_version=version,
            digest="d" * 32,
            progress={"tokens": 1e6, "records": 1e3},
            metrics={"rollout/tokens_per_second": 1e3, "rollout/busy": 0.5},
            view_version=self.seen[name],
        )
        answer = self.table.heartbeat(MemberId(name=name, incarnation=(0, 0)), beat)
        if answer.view is not None:
            self.seen[name] = answer.view.version
        return answer

    def sync(self, version: int) -> Iterator[HeartbeatAnswer]:
        """Publish `version`: what the heartbeats of the members are answered meanwhile."""
        rollouts = [name for name in self.seen if name.startswith(ROLLOUT)]
        for state, held in (
            (MemberState.UPDATING, None),
            (MemberState.UPDATING, version),
            (MemberState.SERVING, version),
        ):
            for name in rollouts:
                yield self.beat(name, state, held)
        for name in self.seen:
            yield self.beat(name, MemberState.SERVING if name in rollouts else MemberState.READY, version)


def sync_cost(rollouts: int, *, syncs: int = 3) -> Cost:
    """Return the mean cost of one weight sync with `rollouts` members."""
    members, cost = Members(rollouts), Cost()
    began = time.process_time()
    for version in range(1, syncs + 1):
        for answer in members.sync(version):
            cost.bytes += sum(memoryview(part).nbytes for part in frames.encode(answer))
            cost.messages += 1
    cost.processor_seconds = (time.process_time() - began) / syncs
    cost.bytes //= syncs
    cost.messages //= syncs
    return cost


class Rollout:
    """A synthetic rollout: it polls for as many groups as it has room for, and finishes them one after another."""

    def __init__(self, number: int, room: int, dispatcher: Dispatcher) -> None:
        self.name, self.room, self.dispatcher = f"rollout:{number}", room, dispatcher
        self.held: deque[PromptLease] = deque()
        self.version = 0
        self.polls = False
        self.on_cancel = None

    def reply(self, leases: list[PromptLease]) -> bool:
        """Receive the answer to the poll, as `rpc.IncomingCall` does."""
        self.polls = False
        self.held.extend(leases)
        return True

    def poll(self) -> None:
        """Poll for what there is room for, unless a poll is open."""
        want = self.room - len(self.held)
        if want > 0 and not self.polls:
            self.polls = True
            self.dispatcher.lease_groups(self, self.name, (0, 0), want, 20.0, self.version)

    def finish(self) -> None:
        """Finish the group that is held longest."""
        lease = self.held.popleft()
        entry = GroupEntry(
            group_id=lease.group_id,
            token=lease.token,
            v_min=lease.policy_version,
            v_max=lease.policy_version,
            rewards=(0.0, 1.0),
            tokens=8,
            informative=True,
        )
        self.dispatcher.finish(self.name, (0, 0), entry)


def step_seconds(rollouts: int, groups: int, steps: int, *, staleness: int) -> dict:
    """Return the processor time of a step; with `staleness` 0 on policy, else generation runs ahead of training."""
    spec = AlgorithmSpec(prompts_per_step=groups, group_size=2, max_staleness=staleness)
    ledger = PromptLedger(range(1_000_000), seed=0, shuffle=False, lease_seconds=120.0, max_attempts=1000)
    admission = Bounded(staleness, groups) if staleness else OnPolicy()
    account, workload = TrainingAccount(ledger, spec, admission, data_ranks=DATA_RANKS), Workload()
    dispatcher = Dispatcher(
        account,
        workload,
        is_live=lambda name, incarnation: True,
        is_short=lambda: False,
        move_records=lambda moves: None,
        fail=lambda error: None,
    )
    loop = StepGroups(dispatcher, workload)
    members = [Rollout(number, -(-groups // rollouts), dispatcher) for number in range(rollouts)]
    seconds = []
    for step in range(1, steps + 1):
        began = time.thread_time()
        for member in members:
            member.version = step - 1
        dispatcher.record_served([(member.name, (0, 0)) for member in members], step - 1)
        loop.open(step, step - 1)
        while not account._step.complete:
            for member in members:
                member.poll()
                if member.held and not account._step.complete:
                    member.finish()
        dispatcher.tick()
        loop.cancel_rest()
        loop.close()
        if len(loop.acknowledge(step)) != groups:
            raise RuntimeError(f"step {step} must train {groups} groups; this is a bug")
        seconds.append(time.thread_time() - began)
    median, limit = statistics.median(seconds[1:]), limit_seconds(rollouts, groups)
    return {
        "step_seconds": round(median, 4),
        "per_group_us": round(1e6 * median / groups, 1),
        "limit_seconds": round(limit, 4),
    }


def limit_seconds(rollouts: int, groups: int) -> float:
    """Return the processor time of the same traffic through plain deques and dicts."""
    pending, held = deque(range(groups)), [deque() for _ in range(rollouts)]
    owner, trained = {}, {}
    began = time.thread_time()
    while pending or any(held):
        for number, mine in enumerate(held):
            if pending:
                group = pending.popleft()
                owner[group] = number
                mine.append(group)
            if mine:
                group = mine.popleft()
                if owner[group] == number:
                    trained[group] = True
    return time.thread_time() - began


def main(rollouts: Sequence[int], sizes: Sequence[str], steps: int) -> None:
    """Print the costs of each size."""
    report: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    for size in sizes:
        members, groups = map(int, size.split("x"))
        for name, staleness in (("on policy", 0), ("asynchronous", 1)):
            report[f"step, {size}, {name}"] = step_seconds(members, groups, steps, staleness=staleness)
    for count in rollouts:
        cost = sync_cost(count)
        report[f"sync, {count}"] = {
            "processor_seconds": round(cost.processor_seconds, 4),
            "megabytes": round(cost.bytes / 1e6, 2),
            "heartbeats": cost.messages,
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[64, 256, 512, 1000], help="sizes of a sync")
    parser.add_argument(
        "--sizes", nargs="*", default=["64x512", "256x1024", "1000x4096"], help="ROLLOUTSxGROUPS of a step"
    )
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    main(options.rollouts, options.sizes, options.steps)
