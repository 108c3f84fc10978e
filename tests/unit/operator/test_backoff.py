"""Pauses double up to a limit, free attempts cost nothing, and a pause that the server asks for is kept within the limit."""

from rljob_operator.runtime.backoff import Backoff


def test_the_pause_doubles_up_to_the_longest():
    backoff = Backoff(first=1.0, longest=60.0)
    assert [backoff.step(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_it_stays_at_the_longest_after_any_number_of_attempts():
    backoff = Backoff(first=1.0, longest=60.0, attempts=10_000)
    assert backoff.step(0.0) == 60.0


def test_remaining_counts_down_to_the_next_attempt():
    backoff = Backoff(first=4.0, longest=60.0)
    assert backoff.remaining(100.0) == 0.0, "the first attempt is due at once"
    backoff.step(100.0)
    assert [backoff.remaining(now) for now in (100.0, 103.0, 104.0, 110.0)] == [4.0, 1.0, 0.0, 0.0]


def test_free_attempts_are_followed_by_no_pause():
    backoff = Backoff(first=1.0, longest=30.0, free_attempts=3)
    assert [backoff.step(0.0) for _ in range(5)] == [0, 0, 0, 1, 2]


def test_jitter_multiplies_each_pause():
    factors = iter((0.5, 1.0, 0.75))
    backoff = Backoff(first=1.0, longest=3.0, jitter=lambda: next(factors))
    assert [backoff.step(0.0) for _ in range(3)] == [0.5, 2.0, 2.25]


def test_a_pause_that_is_asked_for_is_kept_up_to_the_longest():
    backoff = Backoff(first=1.0, longest=10.0)
    assert [backoff.step(0.0, at_least=asked) for asked in (3.0, 1.0, 3600.0)] == [3.0, 2.0, 10.0]
    assert backoff.remaining(4.0) == 6.0
