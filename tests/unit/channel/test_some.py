"""A take of what is there: at least one item, no more than asked for, large ones apart."""

from rl_core.channel.model import MOST_BYTES
from tests.unit.channel.core_bench import Bench


def test_what_is_there_is_taken_up_to_the_number_asked_for():
    bench = Bench()
    takes = [bench.take(most=3) for _ in range(2)]
    bench.put("a")
    assert takes[0].items == ["a"] and not takes[1].done, "one is enough"
    for number in range(5):
        bench.put(number)
    assert takes[1].items == [0] and bench.take(most=3).items == [1, 2, 3] and bench.take(most=3).items == [4]


def test_large_items_do_not_wait_for_each_other():
    bench = Bench()
    for number in range(4):
        bench.put(number, nbytes=MOST_BYTES // 2 if number < 2 else MOST_BYTES)
    assert [bench.take(most=9).items for _ in range(3)] == [[0, 1], [2], [3]]


def test_what_is_not_confirmed_goes_back_in_order():
    bench = Bench()
    for number in range(3):
        bench.put(number)
    take = bench.take(most=2)
    bench.core.give_back(bench.now, take.tokens)
    assert bench.take(most=9).items == [0, 1, 2]
