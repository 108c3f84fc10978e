"""Worker classes of test_script.py. Run as a script, this file is what the test starts and ends from outside."""

import asyncio
import os
import signal
import sys
import time

import numpy as np

from rl_core import Channel, Cluster, Worker


class Adder(Worker):
    def __init__(self, config):
        self.start = config["start"]

    def add(self, number):
        return self.start + self.rank * 10 + number

    def ask(self, rank, number):
        """Let the member `rank` add `number`."""
        deadline = time.monotonic() + 60
        while not (found := [member for member in self.members("adder") if member.rank == rank]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return self.peer(found[0].address).call_sync("add", number, timeout=60)

    def who(self):
        return self.group_name, self.rank, self.world_size, os.getpid()

    def put(self, channel, items):
        channel.register_producer()
        for item in items:
            channel.put(item)
        channel.done_producing()

    def take(self, channel):
        return channel.get(timeout=60)

    def fail_on(self, rank):
        if self.rank == rank:
            raise KeyError("no such row")

    def die_on(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return self.rank

    def sleep(self, seconds):
        time.sleep(seconds)

    def print_much(self, megabytes):
        for _ in range(megabytes):
            print("x" * 2**20)
        return "done"


class Doomed(Worker):
    """Rank 1 cannot be constructed."""

    def __init__(self, end):
        if self.rank == 1 and end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 1:
            raise ValueError("bad config")


class Talker(Worker):
    """Sends and receives by name."""

    def __init__(self, config):
        pass

    def send_all(self, items, group, rank):
        for item in items:
            self.send(item, group, rank)

    def send_to(self, group, tensor, timeout):
        send = self.send_tensor if tensor else self.send
        send("sent", group, 0, timeout=timeout)

    def recv_all(self, count, group, rank, timeout=60):
        return [self.recv(group, rank, timeout=timeout) for _ in range(count)]

    def exchange(self, group):
        """Swap an array of 4 MiB with the same rank of another group."""
        mine = np.full(2**19, float(self.rank))
        sent = self.send_tensor(mine, group, self.rank, async_op=True)
        theirs = np.empty_like(mine)
        self.recv_tensor(theirs, group, self.rank, timeout=60)
        sent.wait(60)
        return float(theirs.sum())

    def recv_into(self, shape, group, rank):
        self.recv_tensor(np.empty(shape, np.float32), group, rank, timeout=60)

    async def echo(self, group, rank):
        await self.send("ping", group, rank, async_op=True).async_wait(60)
        return await self.recv(group, rank, async_op=True, timeout=60).async_wait()

    async def spread_async(self, value, groups, src):
        """Broadcast an array, then pass it on to the next rank into a buffer of its shape."""
        handle = self.broadcast(value if self.rank == src[1] else None, groups=groups, src=src, async_op=True)
        found = await handle.async_wait()
        buffer, peers = np.empty_like(found), self.world_size
        self.send_tensor(found + self.rank, self.group_name, (self.rank + 1) % peers, async_op=True)
        await self.recv_tensor(buffer, self.group_name, (self.rank - 1) % peers, async_op=True).async_wait()
        return buffer.tolist()

    async def take_late(self, group, rank):
        """Await a message that has arrived already."""
        receipt = self.recv(group, rank, async_op=True, timeout=60)
        while not receipt.done():
            await asyncio.sleep(0.01)
        return await receipt.async_wait()

    def spread(self, value, groups, src):
        return self.broadcast(value if self.rank == src[1] else None, groups=groups, src=src, timeout=60)

    def send_part(self, rows, group):
        """Send `rows` consecutive rows, numbered over the ranks of this group."""
        first = self.rank * rows
        ids = np.arange(first, first + rows)
        self.send_rows({"ids": ids, "text": [str(row) for row in ids.tolist()]}, group)

    def recv_part(self, group):
        batch = self.recv_rows(group, timeout=60)
        return batch["ids"].tolist(), batch["text"]

    def spread_unsendable(self, groups, src):
        return self.broadcast(object(), groups=groups, src=src, timeout=60)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_send(self, item, group, rank):
        """Send `item` twice; the process is killed while the second send is under way."""
        self.send(item, group, rank)
        self.send(item, group, rank, async_op=True)
        self.die()


if __name__ == "__main__":
    with Cluster.local(processes=2) as cluster:
        group = Adder.create_group({"start": 5}).launch(cluster, name="adder")
        print(group.add(1).wait(), *(pid for *_, pid in group.who().wait()), flush=True)
        if sys.argv[1] == "raise":
            raise RuntimeError("the script fails")
        if sys.argv[1] == "wait":
            group.sleep(600).wait()
        assert Channel.create("c").qsize() == 0
