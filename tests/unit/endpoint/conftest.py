"""A character tokenizer, chat templates as models have them, and a policy that answers at random."""

import asyncio
import contextlib
import random

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.agents import AgentRolloutImpl
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.endpoint.episodes import Episodes
from rl_core.rollouts.endpoint.server import Endpoint
from rl_core.rollouts.rows import GenerationOutput

SPECIALS = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
CHARACTERS = [chr(code) for code in (9, 10, *range(32, 127))]

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "strips": "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "tools": "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "thinking": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "no end token": "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}{% else %}<|user|>{{ m.content }}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
}


def make_backend():
    names = [*SPECIALS, *CHARACTERS]
    backend = Backend(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIALS)
    return backend


def make_tokenizer(template):
    return Tokenizer(make_backend(), eos_token_id=1, pad_token_id=0, chat_template=template, specials={})


@pytest.fixture(params=TEMPLATES)
def tokenizer(request):
    return make_tokenizer(TEMPLATES[request.param])


@pytest.fixture
def chatml():
    return make_tokenizer(TEMPLATES["tools"])


class SampledText:
    """A `RowGenerator` that samples one of its texts, and keeps what it read and what it sampled by the order of its calls."""

    honours_seeds = True

    def __init__(self, tokenizer, texts, *, version=3, seed=0):
        self.tokenizer, self.texts, self.policy_version = tokenizer, texts, version
        self.random = random.Random(seed)
        self.calls = []

    async def generate_row(
        self, prompt, *, seed, stop_strings=None, max_new_tokens=None, greedy=False, group=None, on_tokens=None
    ):
        text = self.random.choice(self.texts) if isinstance(self.texts, list) else self.texts(list(prompt), seed)
        end, reason = ([], "length") if text.endswith("...") else ([3], "stop")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if max_new_tokens is not None and len(ids) > max_new_tokens:
            ids, reason = ids[:max_new_tokens], "length"
        if on_tokens is not None:
            await self.report(ids, on_tokens)
        self.policy_version += self.random.random() < 0.1
        half = len(ids) // 2
        versions = (
            [(0, half, self.policy_version - 1), (half, len(ids), self.policy_version)]
            if half
            else [(0, len(ids), self.policy_version)]
        )
        logprobs = [-self.random.random() for _ in ids]
        self.calls.append((list(prompt), ids, logprobs, versions))
        return GenerationOutput(ids=ids, logprobs=logprobs, finish_reason=reason, versions=versions)

    async def report(self, ids, on_tokens):
        """Report all ids but those of the last step, some at a time, as an engine does while a row runs."""
        at = 0
        while at < len(ids) - 1:
            await asyncio.sleep(0)
            size = self.random.randint(1, 3)
            on_tokens(ids[at : min(at + size, len(ids) - 1)])
            at += size


def make_episodes(tokenizer, *, max_seq_len=2048, max_calls=64):
    return Episodes(ChatTemplate(tokenizer, {1, 3}), max_seq_len=max_seq_len, max_calls=max_calls)


TURNS = ["one", "two", "three"]
QUESTION = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
AFTER = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def scripted(prompt, seed):
    """The reply to a prompt by the number of end-of-turn tokens before it; each user message and each reply has one."""
    return TURNS[prompt.count(3) // 2]


def sample(tokenizer):
    ids = torch.tensor(tokenizer(QUESTION, add_special_tokens=False)["input_ids"])
    return {
        "message_log": [{"role": "user", "content": "hi", "token_ids": ids}],
        "chat": True,
        "length": len(ids),
        "extra_env_info": {"prompt": "hi"},
        "loss_multiplier": 1.0,
        "idx": 7,
        "task_name": "agent",
        "group_id": "0-7",
    }


@contextlib.asynccontextmanager
async def rollouts(tokenizer, environment, *, seconds=20.0, generations=2, **options):
    """Yield what runs groups of the agent `environment`, with an endpoint on loopback and a scripted policy."""
    episodes = make_episodes(tokenizer)
    endpoint = Endpoint(episodes, tokenizer, model="policy", max_new_tokens=64)
    await endpoint.start("127.0.0.1")
    policy = SampledText(tokenizer, scripted)
    policy.policy_version = 9  # its versions rise at random with the calls; rows are compared without them
    try:
        yield AgentRolloutImpl(
            tokenizer,
            {"agent": environment},
            generations,
            2048,
            policy,
            seed=1,
            env_step_seconds=seconds,
            episodes=episodes,
            base_url=lambda: f"http://127.0.0.1:{endpoint.port}/v1",
            model="policy",
            **options,
        )
    finally:
        await endpoint.close()
    assert not episodes._open
