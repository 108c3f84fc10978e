"""Env pods as one environment: where samples go, what travels together, how failures arrive."""

import asyncio

import pytest

from rl_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    InfrastructureError,
    RemoteError,
    RolloutDataFailure,
    RolloutTimeout,
    WorkerLost,
)
from rl_core.messages.envs import EnvAnswer, EnvFailure
from rl_core.rollouts.base import RemoteEnvironment
from rl_core.rollouts.multi_turn import AsyncRolloutImpl
from rl_core.rollouts.scoring import one_reward

LOG = [{"role": "assistant", "content": "text", "token_ids": object()}]


class Pods:
    """Connections to pods by address; each remembers its calls. `answer(row)` makes a row's answer, `send(keys)` may refuse."""

    def __init__(self, *addresses, answer=None, error=None, hold=None, send=None):
        self.send = send or (lambda keys: None)
        self.live, self.calls, self.error, self.hold = list(addresses), {a: [] for a in addresses}, error, hold
        self.answer = answer or (lambda row: self.plain(row))

    @staticmethod
    def plain(row, **changes):
        observation = {"role": "environment", "content": row.key}
        fields = {"metadata": row.metadata, "stop_strings": None, "reward": 1.0, "terminated": True, "answer": None}
        return EnvAnswer(observation=observation, **fields | changes)

    def connect(self, address):
        pods = self

        class Client:
            async def call(self, method, rows, timeout=None):
                assert method == "step_rows" and timeout
                pods.send([row.key for row in rows])
                pods.calls[address].append([row.key for row in rows])
                if pods.hold is not None:
                    await pods.hold.wait()
                if pods.error is not None:
                    raise pods.error
                return [pods.answer(row) for row in rows]

        return Client()

    def environment(self, **options):
        return RemoteEnvironment(lambda: self.live, connect=self.connect, **options)


def step(environment, *keys):
    return environment.step([LOG] * len(keys), [{"n": 1}] * len(keys), keys=keys)


async def test_steps_of_one_moment_travel_as_one_call():
    pods = Pods("a")
    environment = pods.environment()
    found = await asyncio.gather(*[step(environment, f"s{i}") for i in range(5)])
    assert pods.calls["a"] == [[f"s{i}" for i in range(5)]]
    assert [r.observations[0]["content"] for r in found] == [f"s{i}" for i in range(5)]
    assert found[0].metadata == [{"n": 1}] and found[0].rewards == [1.0] and found[0].terminateds == [True]


async def test_steps_that_come_while_a_pod_is_at_work_travel_together_when_it_answers(monkeypatch):
    monkeypatch.setattr("rl_core.rollouts.environment.GATHER_S", 60)
    pods = Pods("a", hold=asyncio.Event())
    environment = pods.environment()
    steps = []
    for key in ("first", "second", "third"):
        steps.append(asyncio.ensure_future(step(environment, key)))
        await asyncio.sleep(0.01)
    assert pods.calls["a"] == [["first"]]
    pods.hold.set()
    await asyncio.gather(*steps)
    assert pods.calls["a"] == [["first"], ["second", "third"]]


async def test_a_pod_that_takes_long_gets_the_next_steps_all_the_same():
    pods = Pods("a", hold=asyncio.Event())
    environment = pods.environment()
    steps = [asyncio.ensure_future(step(environment, "slow"))]
    await asyncio.sleep(0.01)
    steps.append(asyncio.ensure_future(step(environment, "next")))
    async with asyncio.timeout(30):
        while len(pods.calls["a"]) < 2:
            await asyncio.sleep(0.001)
    pods.hold.set()
    await asyncio.gather(*steps)
    assert pods.calls["a"] == [["slow"], ["next"]]


async def test_closing_fails_steps_that_were_not_sent_yet(monkeypatch):
    monkeypatch.setattr("rl_core.rollouts.environment.GATHER_S", 60)
    pods = Pods("a", hold=asyncio.Event())
    environment = pods.environment()
    steps = [asyncio.ensure_future(step(environment, "sent"))]
    await asyncio.sleep(0.01)
    steps.append(asyncio.ensure_future(step(environment, "gathered")))
    await asyncio.sleep(0.01)
    environment.close()
    found = await asyncio.gather(*steps, return_exceptions=True)
    assert [type(one) for one in found] == [InfrastructureError] * 2 and pods.calls["a"] == [["sent"]]


async def test_only_role_and_content_travel():
    seen = []
    pods = Pods("a", answer=lambda row: seen.append(row) or Pods.plain(row))
    await step(pods.environment(), "s")
    assert seen[0].messages == [{"role": "assistant", "content": "text"}]


async def test_new_samples_go_where_least_is_in_flight_and_stay_there():
    hold = asyncio.Event()
    pods = Pods("a", "b", hold=hold)
    environment = pods.environment()
    first = [asyncio.ensure_future(step(environment, f"s{i}")) for i in range(4)]
    await asyncio.sleep(0.01)
    assert sorted(len(c[0]) for c in pods.calls.values()) == [2, 2]
    hold.set()
    await asyncio.gather(*first)
    home = "a" if "s0" in pods.calls["a"][0] else "b"
    await step(environment, "s0")
    assert pods.calls[home][-1] == ["s0"]


async def test_a_pod_lost_between_steps_fails_its_samples_as_infrastructure_and_the_next_try_moves_on():
    pods = Pods("a", "b")
    environment = pods.environment()
    await step(environment, "s")
    home = "a" if pods.calls["a"] else "b"
    pods.live.remove(home)
    with pytest.raises(InfrastructureError, match="is lost with the episode of sample s"):
        await step(environment, "s")
    await step(environment, "s")
    assert pods.calls[pods.live[0]] == [["s"]]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerLost("gone"), InfrastructureError),
        (OSError("socket"), InfrastructureError),
        (DeadlineExceeded("slow"), RolloutTimeout),
        (RemoteError("bug"), RolloutDataFailure),
        (ConfigError("of the far side"), InfrastructureError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_a_failed_call_is_typed_for_every_row(error, kind):
    pods = Pods("a", error=error)
    environment = pods.environment()
    results = await asyncio.gather(*[step(environment, f"s{i}") for i in range(2)], return_exceptions=True)
    assert [type(result) for result in results] == [kind, kind] and results[0].__cause__ is error
    assert environment._pods["a"].rows == 0


async def test_rows_too_large_for_one_message_travel_apart_and_one_that_never_fits_is_bad_data():
    def send(keys):
        if len(keys) > 2 or "huge" in keys:
            raise ValueError("header must have at most 4 bytes")

    pods = Pods("a", send=send)
    environment = pods.environment()
    keys = ["s0", "s1", "huge", "s3", "s4", "s5"]
    results = await asyncio.gather(*[step(environment, key) for key in keys], return_exceptions=True)
    assert sorted(key for call in pods.calls["a"] for key in call) == ["s0", "s1", "s3", "s4", "s5"]
    assert [
        key if isinstance(r, Exception) else r.observations[0]["content"] for key, r in zip(keys, results, strict=True)
    ] == keys
    failures = [result for result in results if isinstance(result, Exception)]
    assert [type(failure) for failure in failures] == [RolloutDataFailure]
    assert "sample huge cannot be sent to an env worker: header must have" in str(failures[0])
    assert environment._pods["a"].rows == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RolloutDataFailure", RolloutDataFailure),
        ("DeadlineExceeded", RolloutTimeout),
        ("InfrastructureError", InfrastructureError),
        ("Odd", RolloutDataFailure),
    ],
)
async def test_rows_fail_apart_from_each_other(name, kind):
    def answer(row):
        return EnvFailure(type=name, message="why") if row.key == "bad" else Pods.plain(row)

    environment = Pods("a", answer=answer).environment()
    good, bad = await asyncio.gather(step(environment, "good"), step(environment, "bad"), return_exceptions=True)
    assert good.rewards == [1.0]
    assert type(bad) is kind and "why" in str(bad) and "sample bad" in str(bad)


async def test_no_pod_is_a_failure_at_once_or_awaited():
    pods = Pods("a")
    pods.live.clear()
    with pytest.raises(InfrastructureError, match="no env worker is ready"):
        await step(pods.environment(), "s")

    changed = asyncio.Event()
    waiting = asyncio.ensure_future(step(pods.environment(available=changed.wait), "s"))
    await asyncio.sleep(0)
    pods.live.append("a")
    changed.set()
    assert (await waiting).rewards == [1.0]


async def test_rewards_by_name_and_rewards_that_do_not_apply_pass_through():
    environment = Pods("a", answer=lambda row: Pods.plain(row, reward={"x": 1.0, "y": None})).environment()
    assert (await step(environment, "s", "t")).rewards == {"x": [1.0, 1.0], "y": [None, None]}
    environment = Pods("a", answer=lambda row: Pods.plain(row, reward=None)).environment()
    assert (await step(environment, "s")).rewards == [None]


async def test_weights_that_come_with_rewards_by_name_are_those_they_are_summed_with():
    row = {"reward": {"style": 1.0, "answer": 0.5}, "reward_weights": {"style": 0.5, "answer": 2.0}}
    environment = Pods("a", answer=lambda asked: Pods.plain(asked, **row)).environment()
    found = await step(environment, "s")
    assert one_reward(found.rewards, environment, "s") == ({"style": 1.0, "answer": 0.5}, 1.5)


async def test_a_missing_worker_is_told_before_the_step_is_taken_for_late(fakes):
    """An environment whose worker never appears is down, which is retried as such; a late answer is another failure."""
    pods = Pods()

    async def never():
        await asyncio.Event().wait()

    environment = pods.environment(available=never, step_seconds=0.01)
    environment.answer_seconds, environment.step_limit_seconds = 0.05, 30.0
    impl = AsyncRolloutImpl(
        fakes.Tokenizer(), {"task": environment}, 1, 64, fakes.Generation("one"), env_step_seconds=0.01
    )
    with pytest.raises(InfrastructureError, match="no env worker is ready"):
        await impl.run_rollout(fakes.sample(task_name="task"))


async def test_a_cancelled_step_does_not_disturb_its_siblings():
    hold = asyncio.Event()
    pods = Pods("a", hold=hold)
    environment = pods.environment()
    one, two = (asyncio.ensure_future(step(environment, key)) for key in "xy")
    await asyncio.sleep(0.01)
    one.cancel()
    hold.set()
    assert (await two).rewards == [1.0]


async def test_closing_fails_what_is_in_flight():
    pods = Pods("a", hold=asyncio.Event())
    environment = pods.environment()
    waiting = asyncio.ensure_future(step(environment, "s"))
    await asyncio.sleep(0.01)
    environment.close()
    with pytest.raises(InfrastructureError, match="closed"):
        await waiting


async def test_a_released_sample_leaves_no_trace():
    environment = Pods("a").environment()
    await step(environment, "s")
    environment.release("s")
    assert environment._homes == {}
