"""What is tidied up beside the loop; a bug in one task must not end the thread that finds stalls."""

import threading
from types import SimpleNamespace

from rl_core.channel import Channel
from rl_core.runner.housekeeping import Housekeeping
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
        self.stops = StopController(lambda: Phase.SYNCING, cancel_training=lambda: None)
        self.channel = Channel.create("trajectories", local=True)
        cluster = SimpleNamespace(members=lambda role, **also: list(actors))
        board = SimpleNamespace(show_channels=self.seen.append, snapshot=self.snapshot)
        self.tidying = Housekeeping(cluster, self.account.dispatcher, board, self.stops, (self.channel,))

    def snapshot(self, ledger, held):
        return {"stall": next(self.stalls)}


def test_leases_that_are_not_renewed_are_given_out_again():
    run = Run()
    run.stalls = iter([None] * 3)
    run.account.dispatcher.open(1, 0)
    held = run.account.lease()
    run.account.clock.now = 2.0
    run.tidying.run(Rounds(1))
    assert [lease.group_id for lease in run.account.lease(who="rollout:1")] == [lease.group_id for lease in held]


def test_an_actor_that_must_go_ends_the_run_to_be_resumed():
    run = Run(SimpleNamespace(name="actor:1", state="draining"))
    run.stalls = iter([None])
    run.tidying.run(Rounds(1))
    assert run.stops.kind is StopKind.INTERRUPT and run.stops.reason == "SIGTERM at actor:1"


def test_a_bug_in_one_task_ends_neither_the_others_nor_the_thread(caplog):
    run = Run()
    run.stalls = iter([])  # looking for a stall raises StopIteration
    run.channel.put({"record": 1})
    run.tidying.run(Rounds(2))
    assert [stats[0].depth for stats in run.seen] == [1, 1]
    assert caplog.text.count("housekeeping failed") == 2


def test_a_stall_is_logged_once_per_reason(caplog):
    run = Run()
    run.stalls = iter([{"reason": "WaitingForRollout", "message": "rollout:0"}] * 2 + [None])
    run.tidying.run(Rounds(3))
    assert caplog.text.count("stall: WaitingForRollout") == 1


def test_it_ends_with_the_run():
    ended = threading.Event()
    ended.set()
    Run().tidying.run(ended)
