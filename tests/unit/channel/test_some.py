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
    bench.core.requeue(bench.now, take.tokens)
    assert bench.take(most=9).items == [0, 1, 2]


def test_moved_items_follow_those_of_the_key_and_serve_who_waits_there():
    bench = Bench()
    take = bench.take(key="rank", most=9)
    for number in range(2):
        bench.put(number, key="token")
    bench.core.move(bench.now, [("token", "rank"), ("token", "rank"), ("nothing", "rank")])
    assert take.items == [0, 1]
    bench.put(2, key="rank")
    bench.put(3, key="token")
    bench.core.move(bench.now, [("token", "rank")])
    assert bench.take(key="rank", most=9).items == [2, 3]


def test_a_moved_item_that_its_consumer_gives_back_is_under_its_new_key():
    bench = Bench()
    bench.put("x", key="token")
    bench.core.move(bench.now, [("token", "rank")])
    bench.core.requeue(bench.now, bench.take(key="rank").tokens)
    assert bench.receive(key="rank") == ["x"]


def test_deleted_items_free_their_bytes_and_are_released():
    bench = Bench(max_bytes=10)
    bench.put("x", key="a", nbytes=10)
    waiting = bench.put("y", key="b", nbytes=10)
    assert not waiting.done
    bench.core.move(bench.now, [("a", None)])
    assert waiting.done and bench.dropped == ["x"] and bench.core.bytes == 10
