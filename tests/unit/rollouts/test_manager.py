"""Retries by kind of failure, budgets of dropped prompts, slots of the buffer."""

import asyncio
import itertools

import pytest

import rl_core.rollouts.manager as manager_module
from rl_core.api.errors import (
    GenerationUnavailable,
    GymTransportError,
    InfrastructureError,
    RemoteError,
    RolloutConfigError,
    RolloutDataFailure,
    RolloutRedispatchExhausted,
    RolloutTimeout,
    WorkerLost,
)
from rl_core.rollouts.manager import (
    FailureKind,
    PushOutcome,
    RetryPolicy,
    RolloutManager,
    classify_failure,
    deadline,
)


class Buffer:
    """Remembers the calls on slots; `broken` names a call that fails."""

    def __init__(self, broken=None):
        self.log, self.broken = [], broken

    def _note(self, verb, *args):
        self.log.append((verb, *args))
        if verb == self.broken:
            raise OSError(f"{verb} failed")

    def reserve(self, slot, start_version, target_step):
        self._note("reserve", slot, start_version, target_step)

    async def commit(self, slot, record, start_version, end_version):
        self._note("commit", slot, start_version, end_version)

    def remove(self, slot):
        self._note("remove", slot)

    def verbs(self):
        return [entry[0] for entry in self.log]


class Scripted:
    """Stands for the implementation: raises what is told per attempt, then succeeds."""

    def __init__(self, *failures):
        self.failures, self.samples = list(failures), []

    async def run_rollout(self, sample):
        self.samples.append(sample)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return "record"


@pytest.fixture
def delays(monkeypatch):
    """Delays asked for; nobody waits."""
    asked = []

    async def sleep(seconds):
        asked.append(seconds)

    monkeypatch.setattr(manager_module.asyncio, "sleep", sleep)
    return asked


def make(fakes, *failures, buffer=None, **retry):
    versions = iter(range(10, 100))
    manager = RolloutManager(
        fakes.Tokenizer(), {"task": fakes.Env()}, 1, 100, 1, fakes.Generation(), retry=RetryPolicy(**retry), buffer=buffer or Buffer(),
        weight_version=lambda: next(versions),
    )  # fmt: skip
    manager._impl = Scripted(*failures)
    return manager


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_generations_per_prompt": 0}, "num_generations_per_prompt must be >= 1"),
        ({"policy_generation": None}, "policy_generation is required for the native async path"),
        ({"use_nemo_gym": True}, "generation_config is required for the NeMo-Gym path"),
        (
            {"use_nemo_gym": True, "generation_config": {"top_k": 5}},
            "top_k is not supported in the generation config in NeMo-Gym path!",
        ),
        ({"max_rollout_turns": 0}, "max_rollout_turns must be >= 1"),
    ],
)
def test_construction_is_checked(fakes, changes, match):
    arguments = {
        "tokenizer": fakes.Tokenizer(),
        "task_to_env": {},
        "num_generations_per_prompt": 1,
        "max_seq_len": 10,
        "policy_generation": fakes.Generation(),
    }
    with pytest.raises(RolloutConfigError, match=match) as caught:
        RolloutManager(**{**arguments, **changes})
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ValueError)


def test_turns_are_unbounded_unless_told(fakes):
    manager = RolloutManager(fakes.Tokenizer(), {}, 1, 10, None, fakes.Generation())
    assert manager._impl.max_rollout_turns == 999999


async def test_a_group_is_reserved_run_and_committed_with_both_versions(fakes):
    buffer = Buffer()
    registry = {}
    outcome = await make(fakes, buffer=buffer).generate_and_push(
        fakes.sample(), target_step=4, inflight_registry=registry
    )
    assert outcome is PushOutcome.COMMITTED and registry == {}
    assert buffer.log == [("reserve", "0-7#1", 10, 4), ("commit", "0-7#1", 10, 11)]


async def test_infrastructure_is_tried_five_times_with_growing_delays_and_the_same_seeds(fakes, delays):
    buffer = Buffer()
    manager = make(fakes, *[GenerationUnavailable("down")] * 4, buffer=buffer)
    assert await manager.generate_and_push(fakes.sample()) is PushOutcome.COMMITTED
    assert delays == [1.0, 2.0, 4.0, 8.0]
    assert [entry[1] for entry in buffer.log if entry[0] == "reserve"] == [f"0-7#{n}" for n in range(1, 6)]
    assert buffer.verbs() == ["reserve", "remove"] * 4 + ["reserve", "commit"]
    assert {sample.get("attempt", 1) for sample in manager._impl.samples} == {1}
    assert manager.metrics()["rollout/redispatch_total"] == 4
    assert manager.metrics()["rollout/redispatch_total/infrastructure"] == 4


async def test_delays_are_capped(fakes, delays):
    manager = make(fakes, *[WorkerLost("x")] * 9, infrastructure_attempts=10, max_delay=5.0)
    await manager.generate_and_push(fakes.sample())
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    "error",
    [RolloutDataFailure("bad"), RolloutTimeout("late"), KeyError("unknown")],
    ids=["data", "deadline", "unknown"],
)
async def test_data_and_deadlines_are_tried_twice_at_once_with_new_seeds(fakes, delays, error):
    manager = make(fakes, error)
    assert await manager.generate_and_push(fakes.sample(attempt=3)) is PushOutcome.COMMITTED
    assert delays == [] and [sample["attempt"] for sample in manager._impl.samples] == [3, 4]


async def test_without_budget_the_original_data_failure_is_raised(fakes):
    error = RolloutDataFailure("bad")
    buffer = Buffer()
    with pytest.raises(RolloutDataFailure) as caught:
        await make(fakes, error, error, buffer=buffer).generate_and_push(fakes.sample())
    assert caught.value is error and buffer.verbs() == ["reserve", "remove"] * 2


async def test_the_skip_budget_is_of_the_run_and_quoted_when_it_is_used_up(fakes):
    manager = make(fakes, *[RolloutDataFailure("bad")] * 6, max_skipped_prompts=2)
    assert await manager.generate_and_push(fakes.sample()) is PushOutcome.SKIPPED
    assert await manager.generate_and_push(fakes.sample()) is PushOutcome.SKIPPED
    with pytest.raises(RolloutDataFailure, match="max_skipped_prompts=2"):
        await manager.generate_and_push(fakes.sample())
    assert manager.metrics()["rollout/skipped_total"] == 2
    assert manager.metrics()["rollout/data_failures_total"] == 6 and manager.metrics()["rollout/data_retry_total"] == 3


async def test_without_budget_lost_machinery_ends_the_run_after_all_attempts(fakes, delays):
    with pytest.raises(RolloutRedispatchExhausted, match=r"after 5 attempt\(s\)") as caught:
        await make(fakes, *[WorkerLost("x")] * 5).generate_and_push(fakes.sample())
    assert isinstance(caught.value.__cause__, WorkerLost)


async def test_drops_in_a_row_are_forgiven_by_a_commit(fakes, delays):
    manager = make(
        fakes,
        *[WorkerLost("x"), None] * 3,
        WorkerLost("y"),
        WorkerLost("z"),
        infrastructure_attempts=1,
        max_consecutive_dropped_prompts=1,
    )
    for _ in range(3):
        assert await manager.generate_and_push(fakes.sample()) is PushOutcome.SKIPPED
        assert await manager.generate_and_push(fakes.sample()) is PushOutcome.COMMITTED
    assert await manager.generate_and_push(fakes.sample()) is PushOutcome.SKIPPED
    with pytest.raises(RolloutRedispatchExhausted, match="max_consecutive_dropped_prompts=1"):
        await manager.generate_and_push(fakes.sample())
    assert (
        manager.metrics()["rollout/max_consecutive_infra_drops"] == 1
        and manager.metrics()["rollout/infra_drops_total"] == 4
    )


async def test_bad_data_does_not_spend_the_budget_of_machinery(fakes):
    manager = make(
        fakes, RolloutDataFailure("a"), RolloutDataFailure("b"), WorkerLost("x"), data_attempts=1, infrastructure_attempts=1,
        max_skipped_prompts=5, max_consecutive_dropped_prompts=1,
    )  # fmt: skip
    assert [await manager.generate_and_push(fakes.sample()) for _ in range(3)] == [PushOutcome.SKIPPED] * 3


async def test_cancellation_frees_the_slot_and_is_not_tried_again(fakes):
    buffer = Buffer()
    manager = make(fakes, asyncio.CancelledError(), buffer=buffer)
    with pytest.raises(asyncio.CancelledError):
        await manager.generate_and_push(fakes.sample())
    assert buffer.verbs() == ["reserve", "remove"] and len(manager._impl.samples) == 1


async def test_a_slot_is_freed_where_the_reservation_itself_is_cut_off(fakes):
    class Remote(Buffer):
        async def reserve(self, *args):
            self._note("reserve", *args)
            await asyncio.Event().wait()  # reserved over there, the answer never comes

    buffer = Remote()
    pushed = asyncio.ensure_future(make(fakes, buffer=buffer).generate_and_push(fakes.sample()))
    while not buffer.log:
        await asyncio.sleep(0)
    pushed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushed
    assert buffer.verbs() == ["reserve", "remove"]


async def test_a_slot_that_cannot_be_removed_never_hides_the_failure(fakes):
    error = RolloutDataFailure("the cause")
    with pytest.raises(RolloutDataFailure, match="the cause"):
        await make(fakes, error, buffer=Buffer(broken="remove"), data_attempts=1).generate_and_push(fakes.sample())


async def test_a_failing_commit_frees_the_slot(fakes):
    buffer = Buffer(broken="commit")
    with pytest.raises(OSError, match="commit failed"):
        await make(fakes, buffer=buffer, data_attempts=1).generate_and_push(fakes.sample())
    assert buffer.verbs() == ["reserve", "commit", "remove"]


async def test_run_retries_and_raises_the_last_failure_unchanged(fakes, delays):
    first, second = RolloutDataFailure("1"), RolloutDataFailure("2")
    assert await make(fakes, first).run(fakes.sample()) == "record"
    with pytest.raises(RolloutDataFailure) as caught:
        await make(fakes, first, second).run(fakes.sample())
    assert caught.value is second


async def test_a_wrong_setting_is_not_tried_again(fakes):
    manager = make(fakes, RolloutConfigError("no weights"), max_skipped_prompts=9)
    with pytest.raises(RolloutConfigError):
        await manager.generate_and_push(fakes.sample())
    assert len(manager._impl.samples) == 1


async def test_a_group_has_a_deadline(fakes):
    class Hangs:
        async def run_rollout(self, sample):
            await asyncio.sleep(3600)

    manager = RolloutManager(fakes.Tokenizer(), {}, 1, 10, 1, fakes.Generation(), group_seconds=0.01)
    manager._impl = Hangs()
    with pytest.raises(RolloutTimeout, match="rollout of group 0-7 missed its deadline"):
        await manager.run_rollout(fakes.sample())


@pytest.mark.parametrize("name", ["infrastructure_attempts", "data_attempts", "deadline_attempts"])
def test_zero_attempts_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        RetryPolicy(**{name: 0})


class Http(Exception):
    def __init__(self, **status):
        self.__dict__.update(status)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerLost(""), FailureKind.INFRASTRUCTURE),
        (GymTransportError(""), FailureKind.INFRASTRUCTURE),
        (ConnectionResetError(), FailureKind.INFRASTRUCTURE),
        (Http(status=503), FailureKind.INFRASTRUCTURE),
        (Http(status_code=429), FailureKind.INFRASTRUCTURE),
        (Http(status=408), FailureKind.INFRASTRUCTURE),
        (Http(status=404), FailureKind.DATA),
        (RolloutDataFailure(""), FailureKind.DATA),
        (RemoteError(""), FailureKind.DATA),
        (ValueError(), FailureKind.DATA),
        (TimeoutError(), FailureKind.DATA),
        (RolloutTimeout(""), FailureKind.DEADLINE),
    ],
    ids=lambda value: repr(value) if isinstance(value, Exception) else value.value,
)
def test_failures_are_classified_by_type_or_status(error, kind):
    assert classify_failure(error) is kind


def chain(*errors):
    for upper, lower in itertools.pairwise(errors):
        upper.__cause__ = lower
    return errors[0]


def test_causes_are_followed_contexts_are_not():
    assert classify_failure(chain(ValueError(), WorkerLost(""))) is FailureKind.INFRASTRUCTURE
    error = ValueError()
    error.__context__ = WorkerLost("")
    assert classify_failure(error) is FailureKind.DATA


def test_an_explicit_data_failure_in_the_chain_wins():
    assert classify_failure(chain(GenerationUnavailable(""), RolloutDataFailure(""))) is FailureKind.DATA


@pytest.mark.parametrize(("depth", "kind"), [(8, FailureKind.INFRASTRUCTURE), (9, FailureKind.DATA)])
def test_causes_are_followed_to_depth_eight(depth, kind):
    assert classify_failure(chain(*[ValueError() for _ in range(depth)], WorkerLost(""))) is kind


async def test_a_deadline_converts_its_own_expiry_only():
    with pytest.raises(RolloutTimeout, match="step missed its deadline of 0.01 s"):
        async with deadline(0.01, "step"):
            await asyncio.sleep(3600)
    inner = TimeoutError("inner")
    with pytest.raises(TimeoutError) as caught:
        async with deadline(3600, "step"):
            raise inner
    assert caught.value is inner
    async with deadline(None, "unbounded"):
        await asyncio.sleep(0)


async def test_cancellation_passes_a_deadline_unchanged():
    async def work():
        async with deadline(3600, "step"):
            await asyncio.sleep(3600)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_infrastructure_error_is_the_base_of_what_is_retried():
    assert issubclass(GenerationUnavailable, InfrastructureError)
