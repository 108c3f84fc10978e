"""Tasks beside the loop: a bug in one of them must not end the thread that finds stalls, a channel server must not block it."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

from rl_core.channel import Channel
from rl_core.plan.groups import BUILT_IN
from rl_core.runner.periodic import PeriodicTasks
from rl_core.runner.status import Phase
from rl_core.runner.stopping import StopController, StopKind
from tests.unit.runner.account import Account


class Rounds:
    """Ends after so many rounds."""

    def __init__(self, count):
        self.left = count

    def wait(self, seconds):
        self.left -= 1
        return self.left < 0


class Run:
    def __init__(self, *actors):
        self.account, self.seen, self.stalls = Account(lease_seconds=2.0), [], iter(())
        self.stops = StopController(lambda: Phase.SYNCING)
        self.channel = Channel.create("trajectories", local=True)
        cluster = SimpleNamespace(kinds=BUILT_IN, members=lambda role, **also: list(actors))
        board = SimpleNamespace(show_channels=self.seen.append, stall=lambda: next(self.stalls))
        also = (self.account.dispatcher.tick,)
        self.tasks = PeriodicTasks(cluster, board, self.stops, channels=[self.channel], also=also)


def test_leases_that_are_not_renewed_are_given_out_again():
    run = Run()
    run.stalls = iter([None] * 3)
    run.account.steps.open(1, 0)
    held = run.account.lease()
    run.account.clock.now = 2.0
    run.tasks.run(Rounds(1))
    assert [lease.group_id for lease in run.account.lease(who="rollout:1")] == [lease.group_id for lease in held]


def test_an_actor_that_must_go_ends_the_run_to_be_resumed():
    run = Run(SimpleNamespace(name="actor:1", state="draining"))
    run.stalls = iter([None])
    run.tasks.run(Rounds(1))
    assert run.stops.kind is StopKind.INTERRUPT and run.stops.reason == "SIGTERM at actor:1"


def test_a_bug_in_one_task_ends_neither_the_others_nor_the_thread(caplog):
    run = Run()
    run.stalls = iter([])  # looking for a stall raises StopIteration
    run.channel.put({"record": 1})
    run.tasks.run(Rounds(2))
    assert [stats[0].depth for stats in run.seen] == [1, 1]
    assert caplog.text.count("a periodic task failed") == 2


def test_a_stall_is_logged_once_per_reason(caplog):
    run = Run()
    run.stalls = iter([{"reason": "WaitingForRollout", "message": "rollout:0"}] * 2 + [None])
    run.tasks.run(Rounds(3))
    assert caplog.text.count("stall: WaitingForRollout") == 1


def test_it_ends_with_the_run():
    ended = threading.Event()
    ended.set()
    Run().tasks.run(ended)


def test_a_channel_server_that_does_not_answer_delays_no_task_and_is_asked_once():
    run, requests = Run(), []
    run.stalls = iter([None] * 3)

    def request_stats():
        requests.append(Future())
        return requests[-1]

    run.channel.request_stats = request_stats
    began = time.monotonic()
    run.tasks.run(Rounds(3))
    assert len(requests) == 1 and run.seen == [] and next(run.stalls, "all looks were made") == "all looks were made"
    assert time.monotonic() - began < 30, "a call on the channel waits a minute for the server"
    requests[0].set_result("stats")
    run.stalls = iter([None])
    run.tasks.run(Rounds(1))
    assert run.seen == [["stats"]]
