"""A rollout worker over real parts in one process: publisher, receiver, channels, RPC; only the env worker is a small RPC server."""

import asyncio
import json
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from rl_core.api.errors import GenerationUnavailable
from rl_core.api.job import RLJobSpec
from rl_core.channel import Channel
from rl_core.messages.envs import EnvAnswer, EnvFailure
from rl_core.messages.groups import PromptLease
from rl_core.messages.members import MemberState, MemberView, View
from rl_core.messages.weights import ReceiverAddress
from rl_core.rollouts.hf.config import DecoderConfig
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.hf.worker import HFRolloutWorker
from rl_core.transports import tokens
from rl_core.transports.handlers import HandlerLoop
from rl_core.transports.rpc import RpcClient, RpcServer, inline
from rl_core.weights.publisher import WeightPublisher
from rl_core.weights.version_source import StateSource

CONFIG = {
    "model_type": "qwen2", "vocab_size": 43, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip


def tokenizer_files() -> dict[str, bytes]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=.,"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}).encode(),
    }


def random_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = DecoderWeights(DecoderConfig.from_dict(CONFIG)).names_and_shapes()
    return {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }


class EnvPod:
    """Answers `step_rows` as an env worker does: reward = share of the letter a; told texts fail."""

    def __init__(self):
        self.calls = []
        self.fail = None
        self.hold = None
        self.server = RpcServer("tcp://127.0.0.1:0", {"step_rows": self.step_rows}).start()

    async def step_rows(self, rows):
        self.calls.append(len(rows))
        if self.hold is not None:
            await asyncio.wrap_future(self.hold)
        return [self.answer(row) for row in rows]

    def answer(self, row):
        if self.fail is not None:
            return EnvFailure(type=self.fail, message="told to fail")
        text = row.messages[-1]["content"]
        reward = text.count("a") / max(1, len(text))
        return EnvAnswer(
            observation={"role": "environment", "content": ""},
            metadata=None,
            stop_strings=None,
            reward=reward,
            terminated=True,
            answer=None,
        )


class Ledger:
    """The runner's part of the lease protocol on a real hub: gives out what a test puts in, for the version that is asked for."""

    def __init__(self):
        self.lock = threading.Lock()
        self.pending, self.polls, self.given_back = [], [], []
        self.server = RpcServer(
            "tcp://127.0.0.1:0",
            {"lease_groups": self.lease_groups, "renew": lambda tokens: [], "give_back": self.give_back},
        ).start()

    @inline
    def lease_groups(self, call, want, seconds, version):
        with self.lock:
            self.polls.append((call, want, version))
        self.answer()

    def put(self, *leases):
        with self.lock:
            self.pending += leases
        self.answer()

    def answer(self):
        """Answer the newest poll with what lies there for its version, and older ones with nothing: they were superseded."""
        with self.lock:
            for call, _, _ in self.polls[:-1]:
                call.reply([])
            del self.polls[:-1]
            if not self.polls:
                return
            call, want, version = self.polls[0]
            found = [one for one in self.pending if one.policy_version == version][:want]
            if found:
                self.pending = [one for one in self.pending if one not in found]
                self.polls.clear()
                call.reply(found)

    def give_back(self, token, reason, message):
        self.given_back.append((token, reason, message))

    def close(self):
        with self.lock:
            for call, _, _ in self.polls:
                call.reply([])
            self.polls.clear()
        self.server.close()


class World:
    """Everything around one worker."""

    def __init__(self, **rollout):
        self.spec = RLJobSpec.model_validate(
            {
                "model": {"path": "unused"},
                "data": {"train": "unused"},
                "algorithm": {"promptsPerStep": 4, "groupSize": 4},
                "rollout": {"maxBatch": 16, "sampling": {"maxNewTokens": 8}, **rollout},
            }
        )
        self.env = EnvPod()
        self.ledger = Ledger()
        self.worker = HFRolloutWorker(self.spec, {"max_seq_len": 32})
        context = self.worker._context
        context.files = tokenizer_files()
        context.hub = RpcClient(self.ledger.server.address)
        self.worker.init_worker()
        self.engine = self.worker._built().engine
        handlers = {n: getattr(self.worker, n) for n in ("weights_offer", "weights_transfer", "weights_commit")}
        self.server = RpcServer("tcp://127.0.0.1:0", handlers).start()
        self.publisher = WeightPublisher(self.spec, 0)
        self.trajectories, self.validation = (Channel.create(name, local=True) for name in ("t", "v"))
        self.show_env(True)

    def show_env(self, there: bool):
        member = MemberView(
            name="env:0", role="env", group="env", rank=0, pod="env-0", address=self.env.server.address, pid=1,
            host_token="", incarnation=(0, 0), state=MemberState.READY if there else MemberState.LOST,
        )  # fmt: skip
        self.worker._context.update_view(View(version=1, members=[member]))

    def on_loop(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, HandlerLoop.shared().loop).result(120)

    def publish(self, version: int, seed: int):
        receivers = [ReceiverAddress(name="rollout:0", address=self.server.address, host_token=tokens.host_token())]
        return self.publisher.publish(version, StateSource(random_state(seed)), receivers, 1)

    def start(self):
        self.on_loop(self.worker.start_rollout(self.trajectories, self.validation))

    def put(self, *indices, **changes):
        """Let these groups be leased: training groups of 4 for version 1 unless `changes` says otherwise."""
        self.ledger.put(*[self.lease(index, **changes) for index in indices])

    def lease(self, index, mode="train", version=1, again=""):
        """Return a lease of a group; `again` tells a further one from the first, as the runner gives each a token of its own."""
        ids = np.arange(2, 6 + index % 3, dtype=np.int64)
        return PromptLease(
            mode=mode,
            group_id=f"{mode}-{index}",
            token=f"token-{index}{again}",
            sample={
                "message_log": [{"role": "user", "content": "x", "token_ids": ids}],
                "length": len(ids),
                "extra_env_info": {"ground_truth": "a"},
                "loss_multiplier": 1.0,
                "idx": index,
                "task_name": "math",
            },
            num_generations=4 if mode == "train" else 1,
            attempt=1,
            policy_version=version,
            temperature=None if mode == "train" else 0.0,
            lease_seconds=120.0,
        )

    def close(self):
        self.on_loop(self.worker.close())
        self.publisher.close()
        self.ledger.close()
        for server in (self.server, self.env.server):
            server.close()
        self.worker._context.hub.close()
        self.worker._context.close()


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def records(world: World, count: int):
    return [world.trajectories.get(timeout=120) for _ in range(count)]


def test_nothing_is_leased_before_a_version_is_proven(world):
    world.start()
    world.put(0)
    assert world.worker.status()["version"] == -1
    assert world.ledger.polls == []
    with pytest.raises(GenerationUnavailable):
        world.on_loop(world.worker.probe([3, 4, 5], 2))
    world.publish(1, seed=1)
    (record,) = records(world, 1)
    assert record.group_id == "train-0" and record.start_version == record.end_version == 1


def test_every_group_arrives_with_the_lease_token_and_versions_of_the_served_weights(world):
    world.start()
    world.publish(1, seed=1)
    world.put(*range(6))
    found = {record.group_id: record for record in records(world, 6)}
    assert sorted(found) == [f"train-{index}" for index in range(6)]
    for index in range(6):
        record = found[f"train-{index}"]
        assert record.lease_token == f"token-{index}" and len(record.completions) == 4
        for completion in record.completions:
            assert completion.policy_versions == (1, 1)
            assert math.isfinite(completion.reward)
            assert completion.message_log[1]["generation_logprobs"].dtype == torch.float32
    assert world.ledger.given_back == []


def test_samples_repeat_by_seed_whatever_shares_the_batch_and_change_with_the_weights(world):
    def tokens(record):
        return [completion.message_log[1]["token_ids"].tolist() for completion in record.completions]

    world.start()
    world.publish(1, seed=1)
    world.put(0)
    (alone,) = records(world, 1)
    world.put(*range(5), again="-again")
    together = {record.group_id: record for record in records(world, 5)}
    assert tokens(alone) == tokens(together["train-0"])
    assert len({tuple(ids) for ids in tokens(alone)}) > 1
    world.publish(2, seed=2)
    world.put(0, version=2)
    (after,) = records(world, 1)
    assert tokens(after) != tokens(alone) and after.completions[0].policy_versions == (2, 2)


def test_a_late_joiner_pulls_the_committed_version_and_serves_it(world):
    world.publisher.publish(5, StateSource(random_state(3)), [], 0)
    answer = world.on_loop(world.worker.join(world.publisher.address))
    assert answer.version == 5 and answer.digest
    world.start()
    world.put(0, version=5)
    (record,) = records(world, 1)
    assert record.completions[0].policy_versions == (5, 5)


def test_the_served_weights_are_the_published_ones(world):
    world.publish(1, seed=9)
    served = dict(world.engine.loop.engine._decoder.weights.named_tensors())
    for name, tensor in random_state(9).items():
        assert served[name].equal(tensor), name


def test_probe_scores_a_continuation_at_the_training_temperature():
    world = World(sampling={"maxNewTokens": 8, "temperature": 0.5})
    try:
        world.publish(1, seed=4)
        answer = world.on_loop(world.worker.probe([3, 4, 5], 4))
        assert answer.version == 1 and 1 <= len(answer.ids) == len(answer.logprobs) <= 4
        again = world.on_loop(world.worker.probe([3, 4, 5], 4))
        assert again == answer
    finally:
        world.close()


def test_a_data_failure_is_given_back_with_its_reason_and_leaves_no_record(world):
    world.env.fail = "RolloutDataFailure"
    world.start()
    world.publish(1, seed=1)
    world.put(0)
    world.put(1, mode="validate")
    wait_for(lambda: len(world.ledger.given_back) == 2)
    for index, (token, reason, message) in enumerate(sorted(world.ledger.given_back)):
        assert (token, reason) == (f"token-{index}", "data") and "told to fail" in message
    assert world.trajectories.qsize() == world.validation.qsize() == 0


def test_validation_is_scored_apart_from_training(world):
    world.start()
    world.publish(1, seed=1)
    world.put(3, mode="validate")
    answer = world.validation.get(timeout=120)
    assert (answer.group_id, answer.token) == ("validate-3", "token-3")
    assert len(answer.rewards) == len(answer.lengths) == len(answer.truncated) == 1
    assert world.trajectories.qsize() == 0


def test_an_update_waits_for_groups_in_flight_and_later_prompts_wait_for_it(world):
    import concurrent.futures

    world.start()
    world.publish(1, seed=1)
    world.env.hold = concurrent.futures.Future()
    world.put(0)
    wait_for(lambda: world.env.calls)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(world.publish, 2, 2)
        wait_for(lambda: world.worker.status()["weights"] == "ready")
        world.put(1, version=2)
        assert not publishing.done()
        world.env.hold.set_result(None)
        publishing.result(120)
    first, second = records(world, 2)
    assert (first.group_id, first.end_version) == ("train-0", 1)
    assert (second.group_id, second.start_version) == ("train-1", 2)


def test_a_new_epoch_drops_work_and_serves_nothing_until_weights_are_proven_again(world):
    import concurrent.futures

    world.start()
    world.publish(1, seed=1)
    world.env.hold = concurrent.futures.Future()
    world.put(0)
    wait_for(lambda: world.env.calls)
    world.on_loop(world.worker.on_new_epoch(1))
    world.env.hold.set_result(None)
    assert world.worker.status()["weights"] == "unversioned" and world.worker.status()["groups_in_flight"] == 0
    assert world.trajectories.qsize() == 0
    wait_for(lambda: world.ledger.given_back)
    assert world.ledger.given_back[0][:2] == ("token-0", "stale")


def test_draining_finishes_what_is_in_flight_and_leases_nothing_more(world):
    world.start()
    world.publish(1, seed=1)
    world.put(0)
    wait_for(lambda: world.worker.status()["groups_in_flight"] or world.trajectories.qsize())
    world.on_loop(world.worker.drain())
    world.put(1)
    wait_for(lambda: world.ledger.given_back)  # what the poll of before brings
    assert world.ledger.given_back[0][:2] == ("token-1", "stale") and world.trajectories.qsize() == 1


def test_groups_wait_for_an_env_worker_to_appear(world):
    world.show_env(False)
    world.start()
    world.publish(1, seed=1)
    world.put(0)
    wait_for(lambda: world.engine.loop.statistics()["rows"] == 4)
    world.show_env(True)
    (record,) = records(world, 1)
    assert len(record.completions) == 4 and not world.ledger.given_back


def test_batches_per_group_repeat_bit_by_bit_under_any_load():
    world = World(batching="perGroup")
    try:
        world.start()
        world.publish(1, seed=1)
        world.put(0)
        (alone,) = records(world, 1)
        world.put(*range(4))
        together = {record.group_id: record for record in records(world, 4)}["train-0"]
        for one, other in zip(alone.completions, together.completions, strict=True):
            assert one.message_log[1]["token_ids"].equal(other.message_log[1]["token_ids"])
            assert one.message_log[1]["generation_logprobs"].equal(other.message_log[1]["generation_logprobs"])
    finally:
        world.close()


def test_a_rollout_process_never_imports_transformers():
    code = (
        "import sys; from rl_core.rollouts.hf.worker import HFRolloutWorker; from rl_core.rollouts.hf.models import model_from_files; import json, torch;"
        f"model_from_files({{'config.json': json.dumps({CONFIG!r}).encode()}}, dtype=torch.float32);"
        "assert not {'transformers', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def wait_for(condition, seconds: float = 120.0):
    """Poll a condition of another thread; a hang fails here instead of at the test's time limit."""
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)
