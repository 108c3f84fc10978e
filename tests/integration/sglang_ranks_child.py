"""Sends one bucket of weights through the real loader to two processes, as SGLang sends it to the ranks of an engine.

Prints what each rank received, as JSON. A process of its own, because importing SGLang takes ten seconds of processor time.
"""

import asyncio
import json
import mmap
import multiprocessing

import torch

from rl_core.messages.engine import TensorPlace
from rl_core.rollouts.sglang.child.weights import ChildWeightLoader, MultiprocessingSerializer

RANKS = 2


def receive(serialized, answers):
    """Answer with the bytes that a rank gets."""
    try:
        bucket = MultiprocessingSerializer.deserialize(serialized)
        answers.put(bucket["flattened_tensor"].tolist())
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


class Manager:
    """Takes an update as SGLang's tokenizer manager does: every rank gets the whole request and reads the entry of its number."""

    def __init__(self):
        self.received = []

    async def update_weights_from_tensor(self, request, _):
        context = multiprocessing.get_context("fork")
        for serialized in request.serialized_named_tensors:
            answers = context.SimpleQueue()
            rank = context.Process(target=receive, args=(serialized, answers))
            rank.start()
            self.received.append(await asyncio.to_thread(answers.get))
            rank.join()
        return True, ""


def main():
    """Load four numbers into both ranks."""
    shared = mmap.mmap(-1, 4)
    shared.write(bytes([1, 2, 3, 4]))
    manager = Manager()
    loader = ChildWeightLoader(manager, shared, ranks=RANKS)
    place = TensorPlace(name="weight", shape=[4], dtype="uint8", offset=0)
    asyncio.run(loader.load([place], version=1))
    print(json.dumps(manager.received))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
