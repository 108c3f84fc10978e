"""Which rows are called together, and when a sample is bad data instead of bad luck."""

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.envs.waiting import Suspects, WaitingRow, pop_batch
from rl_core.messages.envs import EnvRow


def waiting(loop, key="k", task=None, alone=False, open_=True):
    sent = EnvRow(key=key, messages=[], metadata=None, task_name=task)
    row = WaitingRow(row=sent, alone=alone, answer=loop.create_future())
    if not open_:
        row.answer.cancel()
    return row


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


ROWS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.booleans()), max_size=30)


@given(rows=ROWS, limit=st.integers(1, 8))
def test_batches_take_each_open_row_once_in_order_and_never_mix_tasks_or_suspects(rows, limit):
    loop = asyncio.new_event_loop()
    made = [waiting(loop, task=task, alone=alone, open_=open_) for task, alone, open_ in rows]
    queue, batches = deque(made), []
    while batch := pop_batch(queue, limit):
        batches.append(batch)
    loop.close()
    assert not queue
    assert [row for batch in batches for row in batch] == [row for row in made if row.is_open]
    for batch in batches:
        assert len(batch) <= limit
        assert len({row.row.task_name for row in batch}) == 1
        assert len(batch) == 1 or not any(row.alone for row in batch)


def test_all_rows_of_a_task_go_together(loop):
    queue = deque(waiting(loop, key=str(n)) for n in range(5))
    assert [row.key for row in pop_batch(queue, 8)] == ["0", "1", "2", "3", "4"]


def verdicts(loop, suspects, event, times, key="k"):
    found = []
    for _ in range(times):
        row = waiting(loop, key=key)
        getattr(suspects, event)(row, "it happened")
        found.append(row.answer.result().type)
    return found


def test_the_second_timeout_of_a_sample_is_bad_data(loop):
    assert verdicts(loop, Suspects(), "timed_out", 3) == ["RolloutTimeout", "RolloutDataFailure", "RolloutDataFailure"]


def test_the_third_death_of_a_sample_is_bad_data(loop):
    kinds = ["InfrastructureError", "InfrastructureError", "RolloutDataFailure"]
    assert verdicts(loop, Suspects(), "died", 3) == kinds


def test_a_success_clears_the_suspicion_and_rows_without_key_are_never_suspects(loop):
    suspects = Suspects()
    verdicts(loop, suspects, "timed_out", 1)
    assert "k" in suspects
    suspects.clear("k")
    assert "k" not in suspects
    assert verdicts(loop, suspects, "timed_out", 1) == ["RolloutTimeout"]
    assert verdicts(loop, suspects, "timed_out", 3, key="") == ["RolloutTimeout"] * 3
