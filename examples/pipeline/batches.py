"""Batches of at most 32 characters: a loader divides texts among readers, which put them on a channel with their lengths as weights."""

from rl_core import Channel, Cluster, Worker
from rl_core.api.errors import ChannelClosed
from rl_core.plan.placement import NodePlacementStrategy


class Loader(Worker):
    def load(self, texts: list[str]) -> None:
        self.send_rows(texts, "reader")


class Reader(Worker):
    def register(self, channel: Channel) -> None:
        channel.register_producer()

    def read(self, channel: Channel) -> None:
        for text in self.recv_rows("loader", timeout=60):
            channel.put(text, weight=len(text), key="long" if len(text) > 8 else "short", timeout=60)
        channel.done_producing()  # the last one closes the channel


class Trainer(Worker):
    def train(self, channel: Channel, key: str) -> list[list[str]]:
        batches: list[list[str]] = []
        try:
            while True:
                batches.append(channel.get_batch(target_weight=32, key=key, timeout=60))
        except ChannelClosed:
            return batches


def main(texts: list[str]) -> dict[str, list[list[str]]]:
    with Cluster.local(processes=3) as cluster:
        channel = Channel.create("texts", maxsize=64, max_bytes=2**20)
        loader = Loader.create_group().launch(cluster, NodePlacementStrategy([0]), name="loader")
        reader = Reader.create_group().launch(cluster, name="reader")
        trainer = Trainer.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="trainer")
        reader.register(channel).wait(timeout=60)
        calls = [loader.load(texts), reader.read(channel)]
        training = {key: trainer.execute_on(rank).train(channel, key) for rank, key in enumerate(("short", "long"))}
        for call in calls:
            call.wait(timeout=60)
        return {key: result.wait(timeout=60)[0] for key, result in training.items()}


if __name__ == "__main__":
    for name, batches in main(["x" * (1 + row % 20) for row in range(60)]).items():
        print(name, [[len(text) for text in batch] for batch in batches])
