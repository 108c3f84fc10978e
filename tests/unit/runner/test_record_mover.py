"""Records follow the runner's decisions: to the key of a data rank, or out of the channel."""

from concurrent.futures import Future

import pytest

from rl_core.api.errors import ChannelClosed, WorkerLost
from rl_core.channel import Channel
from rl_core.runner.record_mover import RecordMover
from rl_core.runner.training_account import RecordMoves


class SlowChannel:
    """A channel whose answers a test gives."""

    def __init__(self):
        self.calls = []

    def move(self, moves):
        return self._call(list(moves))

    def close_key(self, key):
        return self._call(key)

    def _call(self, what):
        self.calls.append((what, Future()))
        return self.calls[-1][1]

    def answer(self, error=None):
        future = self.calls[-1][1]
        future.set_exception(error) if error is not None else future.set_result(None)

    @property
    def sent(self):
        return [what for what, _ in self.calls]


def test_records_go_to_their_rank_or_are_deleted_and_a_cut_step_ends_after_them():
    channel = Channel.create("trajectories", local=True)
    for token in ("a", "b", "c"):
        channel.put(token, key=token)
    RecordMover(channel).add(RecordMoves([("a", "rank 0"), ("b", None), ("never stored", "rank 0")], ["rank 0"]))
    assert channel.get(key="rank 0") == "a" and channel.stats().depth == 1
    with pytest.raises(ChannelClosed):
        channel.get(key="rank 0")
    assert channel.get(key="c") == "c"


def test_moves_that_come_while_a_message_is_under_way_leave_together():
    channel = SlowChannel()
    mover = RecordMover(channel)
    for token in ("a", "b", "c"):
        mover.add(RecordMoves([(token, None)]))
    assert channel.sent == [[("a", None)]]
    channel.answer()
    assert channel.sent == [[("a", None)], [("b", None), ("c", None)]]


def test_a_key_is_closed_after_the_moves_that_came_before_it():
    channel = SlowChannel()
    mover = RecordMover(channel)
    mover.add(RecordMoves([("a", "k")]))
    mover.add(RecordMoves([("b", "k")], ["k"]))
    channel.answer()
    channel.answer()
    assert channel.sent == [[("a", "k")], [("b", "k")], "k"]


def test_what_failed_is_sent_again_in_its_order(caplog):
    channel = SlowChannel()
    mover = RecordMover(channel)
    mover.add(RecordMoves([("a", "k")]))
    mover.add(RecordMoves([("b", "k")]))
    channel.answer(WorkerLost("the channel server does not answer"))
    assert len(channel.calls) == 1 and "trying again" in caplog.text
    mover.retry()
    assert channel.sent[-1] == [("a", "k"), ("b", "k")]
