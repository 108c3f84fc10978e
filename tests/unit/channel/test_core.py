"""The rules of a channel, one by one, on an injected clock."""

import weakref
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import ChannelClosed, ChannelEmpty, ChannelFull, DeadlineExceeded, ProducerLost
from rl_core.channel.model import add_exactly
from rl_core.messages.channel import ChannelOptions, KeyStats
from tests.unit.channel.core_bench import Bench, Process


class TestFifo:
    def test_items_leave_in_the_order_they_came_per_key(self):
        bench = Bench()
        for number in range(3):
            bench.put(number, key="a")
            bench.put(number * 10, key="b")
        assert [bench.receive(key="a") for _ in range(3)] == [[0], [1], [2]]
        assert bench.receive(key="b") == [0]

    def test_waiting_gets_are_served_in_their_order(self):
        bench = Bench()
        takes = [bench.take() for _ in range(3)]
        bench.put("x")
        bench.put("y")
        assert [take.done for take in takes] == [True, True, False]
        assert takes[0].items == ["x"] and takes[1].items == ["y"]

    def test_get_nowait_is_empty_or_the_oldest(self):
        bench = Bench()
        assert isinstance(bench.take(nowait=True).result, ChannelEmpty)
        bench.put("x")
        assert bench.take(nowait=True).items == ["x"]

    def test_a_deadline_tells_channel_key_depth_and_producers(self):
        bench = Bench()
        bench.core.register_producer(Process("rollout:3"))
        take = bench.take(timeout=5)
        bench.pass_time(4.9)
        assert not take.done
        bench.pass_time(0.2)
        assert isinstance(take.result, DeadlineExceeded)
        for word in ("'c'", "'k'", "depth 0", "rollout:3", "5.1 s"):
            assert word in str(take.result)

    def test_the_deadline_of_a_put_tells_the_limits_and_that_of_a_batch_how_much_was_there(self):
        bench = Bench(maxsize=1)
        bench.put("x", weight=2.0)
        put, batch = bench.put("y", weight=2.0, timeout=1), bench.take(target=8.0, timeout=2)
        bench.pass_time(2.1)
        assert "get_batch from channel 'c' key 'k' waited 2.1 s for items of weight 8, got 4: depth 2" in str(
            batch.result
        )
        assert put.done
        put = bench.put("z", timeout=1)
        bench.pass_time(1.1)
        assert "put on channel 'c' key 'k' waited 1.1 s for room, maxsize 1: depth 2" in str(put.result)

    def test_unknown_keys_are_empty_and_not_full(self):
        bench = Bench(maxsize=1)
        assert bench.core.depth("never") == 0 and not bench.core.is_full("never")


class TestRoom:
    def test_puts_wait_for_room_in_order(self):
        bench = Bench(maxsize=1)
        puts = [bench.put(number) for number in range(3)]
        assert [put.done for put in puts] == [True, False, False]
        assert bench.core.is_full("k")
        assert bench.receive() == [0]
        assert [put.done for put in puts] == [True, True, False]
        assert bench.receive() == [1] and bench.receive() == [2]

    def test_any_number_of_puts_may_wait_for_room_that_comes_at_once(self):
        bench = Bench(maxsize=1)
        puts = [bench.put(number, weight=1) for number in range(2000)]
        assert bench.take(target=1999).items == list(range(1999))
        assert all(put.done for put in puts) and bench.core.depth("k") == 1

    def test_keys_do_not_share_maxsize_but_share_max_bytes(self):
        bench = Bench(maxsize=1, max_bytes=10)
        assert bench.put("a", key=1, nbytes=6).done and not bench.put("b", key=2, nbytes=6).done
        assert bench.receive(key=1) == ["a"]
        assert bench.core.depth(2) == 1

    def test_items_with_consumers_count_as_bytes_but_not_as_items(self):
        bench = Bench(maxsize=1, max_bytes=10)
        bench.put("a", nbytes=6)
        take = bench.take()
        assert bench.core.depth("k") == 0
        second = bench.put("b", nbytes=6)
        assert not second.done
        bench.core.confirm(bench.now, take.tokens)
        assert second.done

    def test_put_nowait_is_full_before_the_payload_is_needed(self):
        bench = Bench(maxsize=1)
        bench.put("a")
        assert isinstance(bench.put("b", nowait=True).result, ChannelFull)
        assert bench.core.depth("k") == 1

    def test_an_item_larger_than_the_channel_is_refused_at_once(self):
        with pytest.raises(ValueError, match="item has 11 bytes, channel 'c' holds at most 10; raise max_bytes"):
            Bench(max_bytes=10).put("a", nbytes=11)

    def test_a_put_that_timed_out_stores_nothing(self):
        bench = Bench(maxsize=1)
        bench.put("a")
        late = bench.put("b", timeout=3)
        bench.pass_time(3)
        assert isinstance(late.result, DeadlineExceeded)
        assert bench.receive() == ["a"] and bench.core.depth("k") == 0

    def test_a_put_waits_for_the_one_before_it_of_the_same_process_and_key_only(self):
        bench = Bench()
        first = bench.reserve("k")
        behind = [bench.put("second", timeout=5), bench.put("third")]
        assert bench.put("other", client=Process("b"), nowait=True).done and bench.put("elsewhere", key="l").done
        assert isinstance(bench.put("now", nowait=True).result, ChannelFull)
        assert not any(put.done for put in behind)
        bench.pass_time(5)
        assert isinstance(behind[0].result, DeadlineExceeded)
        bench.core.store(bench.now, first, "first", 0.0)
        assert behind[1].done and [bench.receive() for _ in range(3)] == [["other"], ["first"], ["third"]]

    @pytest.mark.parametrize("end", ["cancelled", "lost"])
    def test_a_put_whose_item_never_comes_holds_nobody_back(self, end):
        bench = Bench(maxsize=1)
        first, own = bench.reserve("k"), bench.put("own")
        other = bench.put("other", client=Process("b"))
        if end == "lost":
            bench.core.client_lost(bench.now, bench.process)
        bench.core.cancel_put(bench.now, first)
        assert (own.done, other.done) == (end == "cancelled", end == "lost") and bench.core.bytes == 1

    def test_room_that_is_given_up_goes_to_the_next(self):
        bench = Bench(maxsize=1)
        admitted = bench.reserve("k")
        waiting = bench.put("b")
        assert not waiting.done, "reserved room is taken"
        bench.core.cancel_put(bench.now, admitted)
        assert waiting.done


class TestKeys:
    """A key in use is known; one that holds nothing costs nothing."""

    def test_drained_keys_are_forgotten(self):
        bench = Bench(maxsize=2, max_bytes=100)
        for number in range(10_000):
            bench.put(number, key=number)
            assert bench.receive(key=number) == [number]
        stats = bench.core.stats(bench.now)
        assert stats.keys == {} and bench.core._keys == {} and bench.core.next_due() == float("inf")
        assert (stats.puts, stats.gets, stats.bytes) == (10_000, 10_000, 0)

    def test_a_key_whose_item_is_with_a_consumer_comes_back_with_it(self):
        bench = Bench()
        bench.put("a")
        bench.put("b")
        take = bench.take()
        assert bench.receive() == ["b"] and bench.core._keys == {}
        bench.core.cancel_take(bench.now, take.waiting)
        assert bench.core.depth("k") == 1 and bench.receive() == ["a"]

    def test_a_key_with_waiting_takes_or_reserved_room_stays(self):
        bench = Bench(maxsize=1)
        taken = bench.take(key="taken", timeout=50)
        admitted = bench.reserve("room")
        bench.put("x", key="other")
        bench.receive(key="other")
        assert list(bench.core._keys) == ["taken", "room"] and bench.core.next_due() == bench.now + 50
        bench.core.store(bench.now, admitted, "y", 0.0)
        bench.put("z", key="taken")
        assert taken.items == ["z"] and bench.receive(key="room") == ["y"] and bench.core._keys == {}

    def test_a_refused_put_or_take_leaves_no_key_behind(self):
        bench = Bench(max_bytes=5)
        bench.put("x", key="full", nbytes=5)
        assert isinstance(bench.put("y", key=1, nowait=True).result, ChannelFull)
        assert isinstance(bench.take(key=2, nowait=True).result, ChannelEmpty)
        bench.put("y", key=3, timeout=5)
        bench.take(key=4, timeout=5)
        bench.pass_time(5)
        assert list(bench.core._keys) == ["full"]
        bench.core.close(bench.now)
        assert bench.receive(key="full") == ["x"]
        assert isinstance(bench.put("y", key=5).result, ChannelClosed)
        assert isinstance(bench.take(key=6).result, ChannelClosed)
        assert bench.core._keys == {}

    def test_a_closed_key_is_remembered(self):
        bench = Bench()
        bench.core.close(bench.now, "k")
        assert isinstance(bench.put("x").result, ChannelClosed)
        assert isinstance(bench.take().result, ChannelClosed)
        assert list(bench.core._keys) == ["k"]

    def test_bytes_freed_by_one_key_let_puts_of_others_in(self):
        bench = Bench(max_bytes=10)
        bench.put("a", key=1, nbytes=8)
        waiting = [bench.put("b", key=2, nbytes=5), bench.put("c", key=3, nbytes=5), bench.put("d", key=4, nbytes=5)]
        assert bench.receive(key=1) == ["a"]
        assert [put.done for put in waiting] == [True, True, False]
        assert bench.receive(key=3) == ["c"] and waiting[2].done


class TestDeadlines:
    def test_each_ends_at_its_own_whatever_the_order_of_asking(self):
        bench = Bench(maxsize=1)
        bench.put("x", key="full")
        late, early = bench.take(key=1, timeout=9), bench.take(key=2, timeout=3)
        middle = bench.put("y", key="full", timeout=6)
        for seconds, ended in ((3, early), (3, middle), (3, late)):
            assert bench.core.next_due() == bench.now + seconds and not ended.done
            bench.pass_time(seconds)
            assert isinstance(ended.result, DeadlineExceeded)
        assert bench.core.next_due() == float("inf")

    def test_what_ended_before_its_deadline_leaves_nothing_behind(self):
        bench = Bench()
        for number in range(1000):
            take = bench.take(key=number, timeout=600)
            if number % 2:
                bench.put("x", key=number)
            else:
                bench.core.cancel_take(bench.now, take.waiting)
        assert bench.core.next_due() == float("inf")

    def test_a_put_that_waited_and_was_accepted_is_gone_at_once_with_its_payload(self):
        bench = Bench(maxsize=1)
        bench.put("first")
        waiting = bench.put("second")
        put = weakref.ref(waiting.waiting)
        assert bench.receive() == ["first"] and waiting.done
        del waiting
        assert put() is None


class TestBatch:
    def batch(self, weights, target, **options):
        bench = Bench()
        for number, weight in enumerate(weights):
            bench.put(number, weight=weight)
        return bench, bench.take(target=target, **options)

    def test_the_example_of_the_specification(self):
        bench, take = self.batch([4, 1, 6], 8)
        assert take.items == [0, 1] and bench.core.depth("k") == 1

    def test_a_head_heavier_than_the_target_gives_nothing_at_once(self):
        bench, take = self.batch([9, 1], 8)
        assert take.result == [] and bench.core.depth("k") == 2

    def test_or_that_one_item_when_oversize_is_allowed(self):
        bench, take = self.batch([9, 1], 8, allow_oversize=True)
        assert take.items == [0] and bench.core.depth("k") == 1

    def test_weights_are_added_exactly(self):
        assert self.batch([0.1] * 10, 1.0)[1].items == list(range(10))
        assert self.batch([0.1, 0.2, 0.3], 0.6)[1].items == [0, 1, 2]
        assert self.batch([1e16, 1.0, 1.0], 1e16 + 2)[1].items == [0, 1, 2]
        assert self.batch([1e308, 1e308], 1.5e308)[1].items == [0]

    @given(st.lists(st.floats(0, 1e300, allow_nan=False), max_size=12))
    def test_the_exact_sum_is_that_of_fractions(self, numbers):
        parts = ()
        for number in numbers:
            parts = add_exactly(parts, number)
        assert sum(map(Fraction, parts)) == sum(map(Fraction, numbers))

    def test_oversize_does_not_apply_behind_a_taken_item(self):
        bench, take = self.batch([1, 9], 8, allow_oversize=True)
        assert take.items == [0] and bench.core.depth("k") == 1

    def test_target_zero_takes_one_item_of_weight_zero(self):
        bench, take = self.batch([0, 0], 0)
        assert take.items == [0] and bench.core.depth("k") == 1

    def test_target_zero_before_a_heavy_head_gives_nothing(self):
        assert self.batch([1], 0)[1].result == []

    def test_zero_weights_under_a_positive_target_are_taken_and_waited_on(self):
        bench, take = self.batch([0, 0], 2)
        assert not take.done and bench.core.depth("k") == 0
        bench.put(2, weight=2)
        assert take.items == [0, 1, 2]

    def test_it_waits_on_an_empty_queue_holding_what_it_has(self):
        bench, take = self.batch([3], 8)
        behind = bench.take()
        assert not take.done
        bench.put(1, weight=5)
        assert take.items == [0, 1] and not behind.done
        bench.put(2)
        assert behind.items == [2]

    def test_concurrent_batches_never_interleave(self):
        bench, first = self.batch([], 4)
        second = bench.take(target=4)
        for number in range(4):
            bench.put(number, weight=2)
        assert first.items == [0, 1] and second.items == [2, 3]

    def test_on_close_it_gives_what_it_holds(self):
        bench, take = self.batch([3], 8)
        bench.core.close(bench.now)
        assert take.items == [0]

    def test_on_close_with_nothing_held_it_is_closed(self):
        bench, take = self.batch([], 8)
        bench.core.close(bench.now)
        assert isinstance(take.result, ChannelClosed)

    @pytest.mark.parametrize("how", ["deadline", "cancel", "death"])
    def test_held_items_go_back_to_the_head_in_order(self, how):
        bench = Bench()
        other = Process("other")
        for number in range(3):
            bench.put(number, weight=1)
        take = bench.take(target=9, timeout=5, client=other)
        assert bench.core.depth("k") == 0
        if how == "deadline":
            bench.pass_time(5)
            assert isinstance(take.result, DeadlineExceeded)
        elif how == "cancel":
            bench.core.cancel_take(bench.now, take.waiting)
        else:
            bench.core.client_lost(bench.now, other)
        assert [bench.receive() for _ in range(3)] == [[0], [1], [2]]

    def test_held_items_make_room_for_puts(self):
        bench = Bench(maxsize=1)
        take = bench.take(target=3)
        assert [bench.put(number, weight=1).done for number in range(3)] == [True] * 3
        assert take.items == [0, 1, 2]


class TestDelivery:
    def test_an_item_is_deleted_on_its_receipt_and_not_before(self):
        bench = Bench()
        bench.put("x", nbytes=5)
        take = bench.take()
        assert bench.dropped == [] and bench.core.bytes == 5
        for _ in range(2):  # a receipt that is repeated means nothing
            bench.core.confirm(bench.now, take.tokens)
        assert bench.dropped == ["x"] and bench.core.bytes == 0

    def test_a_lost_consumer_returns_what_it_had_not_confirmed_to_its_old_place_at_once(self):
        bench, consumer = Bench(), Process("rollout:1")
        for item in "abcd":
            bench.put(item)
        takes = [bench.take(client=consumer) for _ in range(3)]
        bench.core.confirm(bench.now, takes[1].tokens)
        bench.core.client_lost(bench.now, consumer)
        assert [bench.receive() for _ in range(3)] == [["a"], ["c"], ["d"]]
        assert bench.core.counters["redelivered"] == 2

    def test_a_receipt_of_the_lost_consumer_does_not_delete_what_another_has(self):
        bench, consumer = Bench(), Process("rollout:1")
        bench.put("x")
        lost = bench.take(client=consumer)
        bench.core.client_lost(bench.now, consumer)
        again = bench.take()
        bench.core.confirm(bench.now, lost.tokens)
        bench.core.client_lost(bench.now, bench.process)
        assert again.items == ["x"] and bench.receive(client=Process("c")) == ["x"]

    def test_a_take_that_nobody_got_returns_to_the_head(self):
        bench = Bench()
        bench.put("x")
        bench.put("y")
        take = bench.take()
        bench.core.cancel_take(bench.now, take.waiting)
        assert bench.receive() == ["x"] and bench.receive() == ["y"]

    def test_a_part_of_a_batch_may_be_given_back(self):
        bench = Bench()
        for item in "abc":
            bench.put(item, weight=1)
        batch = bench.take(target=3)
        bench.core.confirm(bench.now, batch.tokens[1:2])
        for _ in range(2):
            bench.core.requeue(bench.now, [batch.tokens[2], batch.tokens[0]])
        assert bench.receive() == ["a"] and bench.receive() == ["c"] and bench.core.depth("k") == 0


class TestEnds:
    def test_stored_items_are_delivered_after_close_then_gets_end(self):
        bench = Bench()
        bench.put("a")
        bench.core.close(bench.now)
        assert isinstance(bench.put("b").result, ChannelClosed)
        assert bench.receive() == ["a"]
        assert isinstance(bench.take().result, ChannelClosed)
        bench.core.close(bench.now)

    def test_gets_raise_the_error_of_close_and_puts_channel_closed(self):
        bench = Bench()
        error = ValueError("bad data")
        waiting = bench.take()
        bench.core.close(bench.now, error=error)
        assert waiting.result is error
        refused = bench.put("x").result
        assert type(refused) is ChannelClosed and "bad data" in str(refused)
        bench.core.close(bench.now, error=KeyError("later"))
        assert bench.take().result is error, "the first error counts"

    def test_one_key_can_be_closed(self):
        bench = Bench()
        bench.core.close(bench.now, "a")
        assert isinstance(bench.take(key="a").result, ChannelClosed)
        assert bench.put("x", key="b").result == "stored"

    def test_waiting_puts_end_with_close(self):
        bench = Bench(maxsize=1)
        bench.put("a")
        waiting = bench.put("b")
        bench.core.close(bench.now)
        assert isinstance(waiting.result, ChannelClosed)

    def test_an_item_with_another_consumer_keeps_a_closed_channel_open_for_its_return(self):
        bench = Bench()
        other = Process("other")
        bench.put("a")
        bench.take(client=other)
        bench.core.close(bench.now)
        waiting = bench.take()
        assert not waiting.done
        bench.core.client_lost(bench.now, other)
        assert waiting.items == ["a"]

    def test_what_a_consumer_holds_itself_does_not_keep_it_waiting(self):
        bench = Bench()
        bench.put("a")
        bench.take()
        bench.core.close(bench.now)
        assert isinstance(bench.take().result, ChannelClosed)

    def test_the_channel_closes_when_all_producers_are_done(self):
        bench = Bench()
        producers = [Process(f"p:{number}") for number in range(2)]
        for producer in producers:
            bench.core.register_producer(producer)
        bench.put("a")
        bench.core.done_producing(bench.now, producers[0])
        assert bench.receive() == ["a"]
        waiting = bench.take()
        assert not waiting.done
        bench.core.done_producing(bench.now, producers[1])
        assert type(waiting.result) is ChannelClosed
        with pytest.raises(ChannelClosed):
            bench.core.register_producer(producers[0])

    def test_a_process_may_have_several_producers_and_each_ends_by_itself(self):
        bench = Bench()
        for number in (1, 2, 2):  # the same registration twice is one: its message was repeated
            bench.core.register_producer(bench.process, number)
        assert bench.core.stats(bench.now).producers == ("actor:0",)
        bench.core.done_producing(bench.now, bench.process, 1)
        bench.core.done_producing(bench.now, bench.process, 1)
        assert bench.put("of the other").result == "stored"
        bench.core.done_producing(bench.now, bench.process, 2)
        assert isinstance(bench.put("x").result, ChannelClosed)

    def test_a_lost_process_has_lost_all_its_producers(self):
        bench = Bench()
        for number in range(2):
            bench.core.register_producer(bench.process, number)
        bench.core.client_lost(bench.now, bench.process)
        assert isinstance(bench.take(client=Process("other")).result, ProducerLost)

    def test_a_lost_producer_is_named_when_nothing_more_can_come(self):
        bench = Bench()
        lost, alive = Process("actor:1"), Process("actor:2")
        for producer in (lost, alive):
            bench.core.register_producer(producer)
        bench.put("a", client=lost)
        bench.core.client_lost(bench.now, lost)
        bench.core.done_producing(bench.now, alive)
        assert bench.receive() == ["a"], "what was accepted survives its producer"
        assert isinstance(bench.take().result, ProducerLost) and "actor:1" in str(bench.take().result)

    def test_stats_never_show_payloads(self):
        bench = Bench()
        bench.put("secret", weight=2, nbytes=6)
        bench.now += 3
        stats = bench.core.stats(bench.now)
        assert stats.keys == {"k": KeyStats(key="k", depth=1, bytes=6, oldest_age_seconds=3.0, waiters=0)}
        assert "secret" not in str(stats)


@pytest.mark.parametrize("options", [{"maxsize": -1}, {"max_bytes": 0}], ids=str)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        ChannelOptions(**options)
