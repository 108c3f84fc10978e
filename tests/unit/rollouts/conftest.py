"""Fakes for the ports of rollouts: tokenizer (Hugging Face call shapes), generation backend, environments."""

import asyncio

import pytest
import torch

from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.rollouts.rows import GenerationOutput


class CharTokenizer:
    """One character = one id (its code point)."""

    eos_token_id = 0
    pad_token_id = 0

    def __call__(self, text, add_special_tokens=True, return_tensors=None):
        ids = [ord(c) for c in text]
        # Hugging Face returns float for empty text with return_tensors="pt"; callers must cast.
        return {"input_ids": torch.tensor([ids]) if return_tensors == "pt" else ids}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(int(i)) for i in ids if not (skip_special_tokens and int(i) == 0))


class ScriptedGeneration:
    """A `RowGenerator` that answers turn t with script[t] (text, or text and changed fields of the output); a callable sees the request."""

    honours_seeds = True

    def __init__(self, script=("hi",), version=3):
        self.script, self.version = script, version
        self.seen = []
        self.active = 0

    @property
    def policy_version(self):
        return self.version

    async def generate_row(self, prompt, **request):
        request["prompt"] = prompt
        self.seen.append(request)
        self.active += 1
        try:
            await asyncio.sleep(0)
            step = self.script(request) if callable(self.script) else self.script[prompt.count(ord("|"))]
            text, changes = step if isinstance(step, tuple) else (step, {})
            plain = {
                "ids": [ord(c) for c in text],
                "logprobs": [-0.5] * len(text),
                "finish_reason": "stop",
                "versions": [(0, len(text), self.version)],
            }
            return GenerationOutput(**{**plain, **changes})
        finally:
            self.active -= 1


class ScriptedEnv(EnvironmentInterface):
    """Answers turn t with steps[t]: {reward, terminated, content, metadata, stops}; async unless told."""

    def __init__(self, *steps, reward_weights=None):
        self.steps = steps or ({"reward": 1.0, "terminated": True},)
        self.calls = []
        if reward_weights is not None:
            self.reward_weights = reward_weights

    def one(self, log, metadata):
        turn = sum(m["role"] == "assistant" for m in log) - 1
        return self.steps[min(turn, len(self.steps) - 1)]

    async def step(self, message_log_batch, metadata_batch):
        return self.answer(message_log_batch, metadata_batch)

    def answer(self, logs, metadata):
        self.calls.append((logs, metadata))
        steps = [self.one(log, m) for log, m in zip(logs, metadata, strict=True)]
        rewards = [s.get("reward", 0.0) for s in steps]
        if isinstance(rewards[0], dict):
            rewards = {name: torch.tensor([r[name] for r in rewards]) for name in rewards[0]}
        elif None not in rewards:
            rewards = torch.tensor(rewards)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": s.get("content", "|")} for s in steps],
            metadata=[s.get("metadata") for s in steps],
            next_stop_strings=[s.get("stops") for s in steps],
            rewards=rewards,
            terminateds=torch.tensor([s.get("terminated", False) for s in steps]),
            answers=None,
        )


class SyncEnv(ScriptedEnv):
    """The same, blocking."""

    def step(self, message_log_batch, metadata_batch):
        return self.answer(message_log_batch, metadata_batch)


class Fakes:
    Tokenizer = CharTokenizer
    Generation = ScriptedGeneration
    Env = ScriptedEnv
    SyncEnv = SyncEnv

    @staticmethod
    def sample(text="ask", **changes):
        ids = torch.tensor([ord(c) for c in text], dtype=torch.int64)
        return {
            "message_log": [{"role": "user", "content": text, "token_ids": ids}],
            "length": len(ids),
            "extra_env_info": {"deep": {"n": 1}},
            "loss_multiplier": 1.0,
            "idx": 7,
            "task_name": "task",
            "group_id": "0-7",
            **changes,
        }


@pytest.fixture
def fakes():
    return Fakes
