"""What an end of a transfer reports and raises while it waits for work in a thread."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rl_core.api.errors import DeadlineExceeded, WorkerLost
from rl_core.workers.context import WorkerContext
from rl_core.workers.message_channel import Watch
from rl_core.workers.tensor_exchange import TensorExchange


def exchange_of(context, *, seconds=60.0, lost=False):
    messages = SimpleNamespace(context=context, name="a:0")
    return TensorExchange(messages, "b:1", "transfer", seconds, (LostWatch if lost else Watch)(context, "b:1", None))


class LostWatch(Watch):
    lost = True


def test_it_declares_the_wait_until_the_work_has_ended():
    context, work = WorkerContext(), Future()
    waiting = threading.Thread(target=exchange_of(context).wait_for, args=(work,))
    waiting.start()
    while (wait := context.heartbeat().wait) is None:
        time.sleep(0.001)
    work.set_result(None)
    waiting.join(60)
    assert (wait.what, wait.on) == ("a tensor", "b:1") and context.heartbeat().wait is None


def test_it_ends_with_the_reply_of_the_other_end_and_at_a_given_time():
    exchange = exchange_of(WorkerContext())
    exchange.wait_for(Future(), or_done=SimpleNamespace(done=lambda: True))
    exchange.wait_for(Future(), until=time.monotonic())


def test_the_loss_of_the_other_end_and_the_deadline_are_raised():
    with pytest.raises(WorkerLost, match="b:1 is gone; a:0 waited for a tensor"):
        exchange_of(WorkerContext(), lost=True).wait_for(Future())
    with pytest.raises(DeadlineExceeded, match="a tensor between a:0 and b:1 must arrive within 0 s"):
        exchange_of(WorkerContext(), seconds=0.0).wait_for(Future())


def test_another_thread_ends_a_wait_with_an_error():
    exchange, error = exchange_of(WorkerContext()), ValueError("another receiver has failed")
    threading.Timer(0.05, exchange.stop, (error,)).start()
    with pytest.raises(ValueError, match="another receiver has failed"):
        exchange.wait_for(Future())
