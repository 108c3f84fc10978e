"""Two groups of processes and a channel: readers put rows on it, scorers score them, and rank 0 collects by name what the others found."""

import sys

from rl_core import Channel, Cluster, Worker
from rl_core.plan.placement import PackedPlacementStrategy


class Reader(Worker):
    def read(self, rows: list[int], channel: Channel) -> None:
        for row in rows[self.rank :: self.world_size]:
            channel.put(row, timeout=60)


class Scorer(Worker):
    def score(self, channel: Channel, count: int) -> dict[int, int]:
        found = {row: row * row for row in (channel.get(timeout=60) for _ in range(count))}
        if self.rank > 0:
            self.send(found, "scorer", 0)
            return {}
        for other in range(1, self.world_size):
            found |= self.recv("scorer", other, timeout=60)
        return found


def main(rows: list[int]) -> dict[int, int]:
    with Cluster.local(processes=4) as cluster:
        channel = Channel.create("rows", maxsize=8)
        readers = Reader.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="reader")
        scorers = Scorer.create_group().launch(cluster, PackedPlacementStrategy(2, 3), name="scorer")
        scoring = scorers.score(channel, len(rows) // scorers.world_size)
        readers.read(rows, channel).wait(timeout=60)
        return scoring.wait(timeout=60)[0]


if __name__ == "__main__":
    print(main(list(range(int(sys.argv[1]) if len(sys.argv) > 1 else 20))))
