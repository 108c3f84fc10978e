"""A rollout worker and all that is around it, as real parts in one process; only the env worker is a small RPC server."""

import asyncio
import json
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from rl_core.api.job import RLJobSpec
from rl_core.channel import Channel
from rl_core.messages.engine import TensorPlace
from rl_core.messages.envs import EnvAnswer, EnvFailure
from rl_core.messages.groups import PromptLease
from rl_core.messages.members import MemberState, MemberView, View
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.rollouts.hf.config import DecoderConfig
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.hf.worker import HFRolloutWorker
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.content_check import ContentCheck
from rl_core.runner.device_schedule import DisaggregatedSchedule
from rl_core.transports import tokens
from rl_core.transports.handlers import HandlerLoop
from rl_core.transports.rpc import RpcClient, RpcServer, inline
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.publisher import WeightPublisher
from tests.weight_samples import StateSource

CONFIG = {
    "model_type": "qwen2", "vocab_size": 43, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 1, "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip


def tokenizer_files(config: dict = CONFIG) -> dict[str, bytes]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=.,"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return {
        "config.json": json.dumps(config).encode(),
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


def flip_in_memory(pid: int, data: bytes) -> int:
    """Flip a bit behind the first 64 bytes of `data` wherever the process holds them, as a stray write would; return how often."""
    found, regions = 0, []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            resident = int(line.split()[1])
            regions[-1] = (*regions[-1][:2], regions[-1][2] and resident > 0)
        elif "-" in line.split(" ", 1)[0]:
            place, rights = line.split()[:2]
            start, end = (int(one, 16) for one in place.split("-"))
            regions.append((start, end, rights.startswith("rw")))
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for start, end, readable in regions:
            if readable:
                content = os.pread(memory.fileno(), end - start, start)
                at = content.find(data[:64])
                if at >= 0:
                    os.pwrite(memory.fileno(), bytes([content[at + 64] ^ 1]), start + at + 64)
                    found += 1
    return found


def transformers_model(state):
    """Return what transformers makes of `state`: the truth of what an engine computes with it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    names = {name: value for name, value in CONFIG.items() if name not in ("model_type", "architectures")}
    model = Qwen2ForCausalLM(Qwen2Config(**names))
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval()


def trainer_logprobs(model, prompt, ids, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def content_check(worlds, model, prompt):
    """Have the trainer, which is `model` here, score what the engines of `worlds` (by the rollout's name) make of `prompt`.

    Returns how many of them passed. Raises WeightsDiverged.
    """
    first = next(iter(worlds.values()))

    def ask(name, method, args, named, *, timeout):
        answer = Future()
        answer.set_result(SimpleNamespace(value=first.on_loop(worlds[name].worker.probe(*args))))
        return SimpleNamespace(future=answer)

    def score(ids, start):
        found = trainer_logprobs(model, ids[:start], ids[start:]).tolist()
        return SimpleNamespace(wait=lambda seconds: [found])

    check = ContentCheck(
        AppliedSpec(first.spec),
        cluster=SimpleNamespace(submit=ask),
        actor=SimpleNamespace(score=score),
        schedule=DisaggregatedSchedule(),
        prompt_ids=prompt,
    )
    check.schedule(first.version, list(worlds))
    try:
        check.confirm()
    finally:
        check.close()
    return check.counts.passed


def put_behind_the_proof(world, name, tensor):
    """Have the engine hold `tensor` without anybody's knowledge."""
    target = world.engine.weight_target
    if not hasattr(target, "proof"):
        target.destinations()[name].copy_(tensor)
        return
    target._buffer.bytes[: tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
    place = {"name": name, "shape": list(tensor.shape), "dtype": "float32", "offset": 0}
    for method, arguments in (
        ("begin_weights", {}),
        ("load_weights", {"places": [TensorPlace(**place)], "version": world.version}),
        ("end_weights", {"turns": 1, "whole": True}),
    ):
        world.engine.engine.call(method, **arguments).result(60)


ADMITTED = "admitted"
"""Key of the records that the runner's part admitted."""


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
        self.pending, self.polls, self.given_back, self.finished = [], [], [], []
        self.served = -1
        """Version that the worker acknowledged last: a question that is older is answered for it."""
        self.server = RpcServer(
            "tcp://127.0.0.1:0",
            {
                "lease_groups": self.lease_groups,
                "renew": lambda tokens: [],
                "finish": self.finish,
                "return_group": self.return_group,
            },
        ).start()

    @inline
    def lease_groups(self, call, max_groups, timeout, version):
        with self.lock:
            self.polls.append((call, max_groups, version, time.monotonic() + timeout))
        self.answer()

    def put(self, *leases):
        with self.lock:
            self.pending += leases
        self.answer()

    def serve(self, version):
        """Answer from now on for `version`, which the worker has acknowledged."""
        with self.lock:
            self.served = version
        self.answer()

    def answer(self):
        """Answer the newest poll with what lies there for its version, and others with nothing: they were superseded, or their time is up.

        The caller of a poll whose time is up may not listen any more, and what it was given would be lost.
        """
        with self.lock:
            current = [poll for poll in self.polls[-1:] if time.monotonic() < poll[-1]]
            for call, *_ in self.polls[: len(self.polls) - len(current)]:
                call.reply([])
            self.polls = current
            if not self.polls:
                return
            call, max_groups, version, _ = self.polls[0]
            version = max(version, self.served)
            found = [one for one in self.pending if one.policy_version == version][:max_groups]
            if found:
                self.pending = [one for one in self.pending if one not in found]
                self.polls.clear()
                call.reply(found)

    def finish(self, entry):
        """Admit a finished group: its record goes where `records` finds it."""
        self.finished.append(entry)
        self.trajectories.move([(entry.token, ADMITTED)]).result()

    def return_group(self, token, reason, message, failed=None):
        self.given_back.append((token, reason, message))

    def close(self):
        with self.lock:
            for call, *_ in self.polls:
                call.reply([])
            self.polls.clear()
        self.server.close()


class World:
    """Everything around one worker."""

    version = 0
    """Published last by `publish_next`."""

    def __init__(self, worker=HFRolloutWorker, max_seq_len=32, spec=None, config=CONFIG, **rollout):
        self.spec = RLJobSpec.model_validate(
            {
                "model": {"path": "unused"},
                "data": {"train": "unused"},
                "algorithm": {"promptsPerStep": 4, "groupSize": 4},
                "rollout": {"maxBatch": 16, "sampling": {"maxNewTokens": 8}, **rollout},
                **(spec or {}),
            }
        )
        self.env = EnvPod()
        self.ledger = Ledger()
        self.worker = worker(self.spec, {"max_seq_len": max_seq_len})
        context = self.worker._context
        context.files = tokenizer_files(config)
        context.hub = RpcClient(self.ledger.server.address)
        self.worker.init_worker()
        self.engine = self.worker._built().engine
        handlers = {n: getattr(self.worker, n) for n in ("weights_offer", "weights_transfer", "weights_commit")}
        self.server = RpcServer("tcp://127.0.0.1:0", handlers).start()
        patient = replace(Deadlines.from_spec(self.spec), straggler_seconds=60)  # no receiver is late that is only slow
        self.publisher = WeightPublisher(self.spec, 0, deadlines=patient)
        self.host_token = tokens.host_token()
        """Name of the host that the rollout reports to the publisher."""
        self.trajectories, self.validation = (Channel.create(name, local=True) for name in ("t", "v"))
        self.ledger.trajectories = self.trajectories
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
        receivers = [ReceiverAddress(name="rollout:0", address=self.server.address, host_token=self.host_token)]
        report = self.publisher.publish(version, StateSource(random_state(seed)), receivers, 1)
        self.ledger.serve(version)
        return report

    def publish_next(self, state) -> PublishReport:
        """Publish `state` as the version after the last."""
        self.version += 1
        receivers = [ReceiverAddress(name="rollout:0", address=self.server.address, host_token=self.host_token)]
        report = self.publisher.publish(self.version, StateSource(state), receivers, 1)
        self.ledger.serve(self.version)
        return report

    def start(self):
        self.on_loop(self.worker.start_serving(self.trajectories, self.validation))

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


def records(world: World, count: int):
    return [world.trajectories.get(key=ADMITTED, timeout=120) for _ in range(count)]


def wait_for(condition, seconds: float = 120.0):
    """Poll a condition of another thread; a hang fails here instead of at the test's time limit."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)
