"""What control costs the runner: processor time and bytes, with synthetic members and no sockets.

    python benchmarks/control_cost.py [--rollouts 64 256 512 1000]

sync: one weight sync over all rollouts. Each rollout reports `updating`, the new version and `serving`, as real ones do; then each member
sends one more heartbeat. Counted are the heartbeats' processing, and the views that answer them, encoded as they travel.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from rl_core.transports import frames
from rl_core.workers.hub import visible_groups
from rl_core.workers.membership import Membership

ACTORS, ENVS = 8, 16


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


def main(sizes: Sequence[int]) -> None:
    """Print the costs for each number of rollouts."""
    for size in sizes:
        cost = sync_cost(size)
        print(
            f"sync: {size} rollouts: {cost.processor_seconds:.3f} s of processor time, {cost.bytes / 1e6:.2f} MB, "
            f"{cost.messages} heartbeats"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[64, 256, 512, 1000])
    main(parser.parse_args().rollouts)
