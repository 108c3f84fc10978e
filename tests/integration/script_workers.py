"""Worker classes of test_script.py. Run as a script, this file is what the test starts and ends from outside."""

import os
import signal
import sys
import time

from rl_core import Channel, Cluster, Worker


class Adder(Worker):
    def __init__(self, config):
        self.start = config["start"]

    def add(self, number):
        return self.start + self.rank * 10 + number

    def who(self):
        return self.group_name, self.rank, self.world_size, os.getpid()

    def put(self, channel, items):
        channel.register_producer()
        for item in items:
            channel.put(item)
        channel.done_producing()

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


if __name__ == "__main__":
    with Cluster.local(processes=2) as cluster:
        group = Adder.create_group({"start": 5}).launch(cluster, name="adder")
        print(group.add(1).wait(), *(pid for *_, pid in group.who().wait()), flush=True)
        if sys.argv[1] == "raise":
            raise RuntimeError("the script fails")
        if sys.argv[1] == "wait":
            group.sleep(600).wait()
        assert Channel.create("c").qsize() == 0
