"""A rollout worker whose process gets no more memory where a generation needs it; prints what became of its rows and groups.

Keys and values of the rows are 128 MiB, their mask is 32 MiB; a step needs the rest.
"""

import json
import resource
import sys
import threading
from pathlib import Path

from rl_core.rollouts.rows import Row
from rl_core.rollouts.sampling import SamplingParams
from tests.integration import rollout_world
from tests.integration.rollout_world import World, records, wait_for

rollout_world.CONFIG.update(
    hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
GROUP, ROWS, LENGTH, MIB = 4, 2044, 3000, 1 << 20
GREEDY = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)


def used():
    """Return what RLIMIT_DATA counts, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def generate(world, *groups, room=None):
    """Return what became of a large batch, with these groups in it; `room` is the memory it finds, MiB."""
    results, done, prompt = [], threading.Event(), [2 + place % 40 for place in range(LENGTH)]

    def sink(batch):
        results.extend(batch)
        if len(results) == ROWS:
            done.set()

    loop, hard = world.engine.loop, resource.getrlimit(resource.RLIMIT_DATA)[1]
    loop.pause()
    loop.submit([Row(key=row, prompt=prompt, params=GREEDY, seed=1) for row in range(ROWS)], sink)
    world.put(*groups)
    wait_for(lambda: loop.engine.load().waiting == ROWS + GROUP * len(groups))
    if room is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (used() + room * MIB, hard))
    loop.resume()
    assert done.wait(120)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return sorted(
        {
            json.dumps([type(one).__name__, str(one)] if isinstance(one, BaseException) else one.ids)
            for _, one in results
        }
    )


def main():
    world = World(max_seq_len=8192, maxBatch=ROWS + GROUP)
    world.start()
    world.publish(1, seed=1)
    small, *rooms = map(int, sys.argv[1:])
    told = {"short": [], "whole": []}
    for room in rooms:
        told["short"].append(generate(world, room=room))
        told["whole"].append(generate(world))
        world.engine.loop.engine.release_cache()
    told["short"].append(generate(world, 1, room=small))
    (record,) = records(world, 1)
    told["record"] = [record.group_id, len(record.completions), record.start_version]
    told["given_back"] = list(world.ledger.given_back)  # copied: `close` may add to it
    told["retried"] = world.worker._context.heartbeat().metrics["rollout/redispatch_total"]
    world.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
