"""The ledger's guarantees: trained at most once, nothing skipped, nothing repeated after a resume."""

import json
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from rl_core.api.errors import ConfigError
from rl_core.runner.group_table import GroupState
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.prompt_order import Part


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(size=10, *, seed=0, shuffle=True, attempts=3, clock=None, lease_seconds=60.0):
    return PromptLedger(
        list(range(size)),
        seed=seed,
        shuffle=shuffle,
        lease_seconds=lease_seconds,
        max_attempts=attempts,
        clock=clock or FakeClock(),
    )


def outstanding(ledger):
    """Return the state of each group that is not final, by id."""
    return {group.group_id: group.state for group in ledger._table}


def train(ledger, leases, step):
    for lease in leases:
        assert ledger.finish(lease.token)
    ledger.consume([lease.group_id for lease in leases], step)
    return ledger.acknowledge(step)


@given(st.integers(1, 30), st.integers(0, 5), st.integers(1, 4))
def test_every_data_epoch_leases_each_prompt_once(size, seed, epochs):
    ledger = make(size, seed=seed)
    leases = ledger.lease(size * epochs, "r")
    for number in range(epochs):
        part = leases[number * size : (number + 1) * size]
        assert sorted(lease.sample for lease in part) == list(range(size))
        assert all(lease.group_id == f"{number}-{lease.sample}" for lease in part)


def test_without_shuffle_the_order_is_the_files():
    assert [lease.sample for lease in make(3, shuffle=False).lease(5, "r")] == [0, 1, 2, 0, 1]


def test_requeued_groups_come_before_new_ones_in_ledger_order():
    ledger = make(6, shuffle=False)
    first = ledger.lease(3, "a")
    assert ledger.requeue(first[2].token, "worker_lost")
    assert ledger.requeue(first[0].token, "worker_lost")
    again = ledger.lease(3, "b")
    assert [(lease.sample, lease.attempt) for lease in again] == [(0, 2), (2, 2), (3, 1)]


def test_only_the_current_lease_finishes_a_group_and_once():
    ledger = make()
    old = ledger.lease(1, "a")[0]
    ledger.requeue(old.token, "worker_lost")
    new = ledger.lease(1, "b")[0]
    assert not ledger.finish(old.token)
    assert ledger.finish(new.token)
    assert not ledger.finish(new.token)
    assert ledger.counts["late"] == 2


def test_a_record_from_before_a_resume_is_late_although_its_group_is_out_again():
    before = make()
    old = before.lease(3, "a")
    after = make()
    after.load_state_dict(before.state_dict())
    new = after.lease(3, "b")
    assert [lease.group_id for lease in new] == [lease.group_id for lease in old]
    assert not any(after.finish(lease.token) for lease in old)
    assert after.metrics()["ledger/late_total"] == 3
    assert all(after.finish(lease.token) for lease in new)


def test_a_long_run_leaves_nothing_behind_in_the_ledger():
    ledger = make()

    def held():
        parts = [*vars(ledger).values(), *vars(ledger._table).values()]
        return sum(len(value) for value in parts if isinstance(value, dict | list | set))

    sizes = []
    for step in range(1, 200):
        first, *others = ledger.lease(5, "a")
        ledger.requeue(first.token, "worker_lost")
        train(ledger, [*others, *ledger.lease(1, "a")], step)
        sizes.append(held())
    assert sizes[0] == sizes[-1]


@pytest.mark.parametrize("token", ["", "1", "x.1.0-1", "{run}.0.0-1", "{run}.2.0-1", "{run}.1.", "{run}.-1.0-1"])
def test_a_token_that_was_never_given_out_is_unknown(token):
    ledger = make()
    run = ledger.lease(1, "a")[0].token.partition(".")[0]
    with pytest.raises(KeyError, match="never given out"):
        ledger.requeue(token.format(run=run), "worker_lost")
    assert not ledger.finish(token.format(run=run)) and ledger.counts["late"] == 1


def test_a_negative_number_of_groups_is_refused_and_none_gives_none():
    ledger = make()
    ledger.requeue(ledger.lease(2, "a")[0].token, "worker_lost")
    with pytest.raises(ValueError, match="at least 0, got -1"):
        ledger.lease(-1, "a")
    assert ledger.lease(0, "a") == [] and ledger.metrics()["ledger/pending"] == 1


def test_a_token_is_requeued_exactly_once():
    ledger = make()
    lease = ledger.lease(1, "a")[0]
    assert ledger.requeue(lease.token, "deadline")
    assert not ledger.requeue(lease.token, "deadline")
    assert ledger.counts["requeued"] == 1


def test_losing_the_worker_after_it_finished_the_group_loses_nothing():
    ledger = make()
    lease = ledger.lease(1, "a")[0]
    ledger.finish(lease.token)
    assert not ledger.requeue(lease.token, "worker_lost")
    assert outstanding(ledger) == {lease.group_id: GroupState.GENERATED}
    ledger.consume([lease.group_id], 1)
    assert not ledger.requeue(lease.token, "worker_lost")
    assert outstanding(ledger) == {lease.group_id: GroupState.CONSUMED}


@pytest.mark.parametrize("reason", ["stale", "epoch"])
def test_a_generated_record_that_is_too_old_is_generated_again(reason):
    ledger = make()
    lease = ledger.lease(1, "a")[0]
    ledger.finish(lease.token)
    assert ledger.requeue(lease.token, reason)
    assert ledger.lease(1, "a")[0].group_id == lease.group_id


def test_a_group_that_used_up_a_reasons_budget_is_dropped_and_others_count_apart():
    ledger = make(attempts={"data": 2, "worker_lost": 5, "infrastructure": 2, "deadline": 2, "stale": 2, "epoch": 2})
    lease = ledger.lease(1, "a")[0]
    assert ledger.requeue(lease.token, "data")
    lease = ledger.lease(1, "a")[0]
    assert ledger.requeue(lease.token, "worker_lost")
    lease = ledger.lease(1, "a")[0]
    assert not ledger.requeue(lease.token, "data")
    assert ledger.counts["dropped"] == 1 and lease.group_id not in outstanding(ledger)


def test_only_data_and_deadline_failures_change_the_sampling_seed():
    ledger = make()
    attempts = []
    for reason in ("worker_lost", "infrastructure", "data", "deadline", "epoch"):
        lease = ledger.lease(1, "a")[0]
        attempts.append(lease.seed_attempt)
        ledger.requeue(lease.token, reason)
    assert attempts == [1, 1, 1, 2, 3]


def test_an_overdue_lease_expires_and_its_late_record_is_refused():
    clock = FakeClock()
    ledger = make(clock=clock, lease_seconds=10)
    lease = ledger.lease(1, "a")[0]
    clock.now = 9.9
    assert ledger.expire() == []
    clock.now = 10.0
    assert ledger.expire() == [lease.token]
    assert not ledger.finish(lease.token)


def test_acknowledging_a_step_twice_raises():
    ledger = make()
    train(ledger, ledger.lease(2, "a"), step=1)
    with pytest.raises(ValueError, match="step 1 must hold consumed groups"):
        ledger.acknowledge(1)


def test_wrong_states_name_group_and_state():
    ledger = make()
    lease = ledger.lease(1, "a")[0]
    with pytest.raises(ValueError, match=f"group {lease.group_id} must be generated, got state leased"):
        ledger.consume([lease.group_id], 1)
    with pytest.raises(KeyError):
        ledger.consume(["9-9"], 1)
    with pytest.raises(KeyError):
        ledger.requeue("nonsense", "data")
    ledger.finish(lease.token)
    with pytest.raises(ValueError, match=f"group {lease.group_id} must be leased .* for data, got state generated"):
        ledger.requeue(lease.token, "data")
    with pytest.raises(ValueError, match="reason must be one of"):
        ledger.requeue(lease.token, "boredom")


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_group_that_has_ended_is_in_a_wrong_state_not_unknown(shuffle):
    ledger = make(3, shuffle=shuffle)
    first, second, third, again = ledger.lease(4, "a")
    train(ledger, [first, third], step=1)
    for lease, state in ((first, "acknowledged"), (third, "state acknowledged")):
        with pytest.raises(ValueError, match=f"group {lease.group_id} must be outstanding, got .*{state}"):
            ledger.consume([lease.group_id], 2)
    for unknown in ("0-3", "1-7", "2-0", "nonsense"):
        with pytest.raises(KeyError):
            ledger.discard([unknown], "surplus")
    assert set(outstanding(ledger)) == {second.group_id, again.group_id}


def test_a_resumed_ledger_continues_every_set_and_refuses_other_weights():
    def mixed(*weights):
        parts = [Part(3, weights[0]), Part(7, weights[1])]
        return PromptLedger(list(range(10)), seed=2, lease_seconds=60.0, max_attempts=3, parts=parts)

    whole = [lease.group_id for lease in mixed(3, 1).lease(40, "r")]
    ledger = mixed(3, 1)
    train(ledger, ledger.lease(9, "r"), 1)
    ledger.lease(2, "r")
    saved = json.loads(json.dumps(ledger.state_dict()))
    resumed = mixed(3, 1)
    resumed.load_state_dict(saved)
    assert [lease.group_id for lease in resumed.lease(31, "r")] == whole[9:]
    with pytest.raises(ConfigError, match=r"data\.sets"):
        mixed(1, 1).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"data\.sets"):
        make(10, seed=2).load_state_dict(saved)


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        make(0)


def test_a_resume_over_other_data_is_refused():
    state = make(10).state_dict()
    with pytest.raises(ConfigError, match=r"prompts in data\.train: 10 then, 11 now"):
        make(11).load_state_dict(state)


@settings(max_examples=60)
@given(st.data())
def test_a_resumed_ledger_continues_exactly_as_the_uninterrupted_one(data):
    """Whatever was out at the checkpoint comes again first, in order; what was trained never comes again."""
    size = data.draw(st.integers(2, 12))
    ledger = make(size, seed=data.draw(st.integers(0, 3)))
    for step in range(1, data.draw(st.integers(1, 4)) + 1):
        leases = ledger.lease(data.draw(st.integers(1, 6)), "a")
        trained = data.draw(st.lists(st.sampled_from(leases), unique_by=lambda x: x.token, min_size=1))
        train(ledger, trained, step)
        for lease in leases:
            if lease not in trained:
                ledger.requeue(lease.token, "epoch")
        ledger._budgets["epoch"] = 1000
    resumed = make(size, seed=ledger._seed)
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    mine = [(lease.group_id, lease.seed_attempt) for lease in ledger.lease(8, "x")]
    theirs = [(lease.group_id, lease.seed_attempt) for lease in resumed.lease(8, "x")]
    assert mine == theirs


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving: a group is acknowledged at most once, and none is forgotten."""

    leases = Bundle("leases")

    @initialize(size=st.integers(1, 6))
    def begin(self, size):
        self.clock = FakeClock()
        self.ledger = make(size, attempts=2, clock=self.clock, lease_seconds=10)
        self.trained: list[str] = []
        self.step = 0
        self.issued: set[str] = set()

    @rule(target=leases)
    def lease(self):
        lease = self.ledger.lease(1, "w")[0]
        self.issued.add(lease.group_id)
        return lease

    @rule(lease=leases)
    def complete(self, lease):
        self.ledger.finish(lease.token)

    @rule(lease=leases, reason=st.sampled_from(["worker_lost", "data", "stale"]))
    def requeue(self, lease, reason):
        refused = reason == "data" and outstanding(self.ledger).get(lease.group_id) is GroupState.GENERATED
        with (
            pytest.raises(ValueError, match="must be leased") if refused and self._is_current(lease) else nullcontext()
        ):
            self.ledger.requeue(lease.token, reason)

    def _is_current(self, lease):
        return self.ledger.group_by_token(lease.token) is not None

    @rule()
    def time_passes(self):
        self.clock.now += 6
        self.ledger.expire()

    @rule(lease=consumes(leases))
    def train(self, lease):
        if outstanding(self.ledger).get(lease.group_id) is GroupState.GENERATED:
            self.step += 1
            self.ledger.consume([lease.group_id], self.step)
            self.trained += self.ledger.acknowledge(self.step)

    @invariant()
    def trained_once(self):
        if hasattr(self, "trained"):
            assert len(self.trained) == len(set(self.trained))

    @invariant()
    def nothing_forgotten(self):
        if hasattr(self, "trained"):
            final = self.ledger.counts["acknowledged"] + self.ledger.counts["dropped"] + self.ledger.counts["discarded"]
            assert final + len(outstanding(self.ledger)) == len(self.issued)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
