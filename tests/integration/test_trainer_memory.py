"""The estimate of a trainer's memory is what both backends allocate, and no float32 copy of all logits is among it.

Measured in this process, on one rank: torch reports every allocation of its CPU allocator.
"""

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.actors.device import check_memory
from rl_core.algorithms.logprobs import hidden_scores
from rl_core.api.errors import CapacityError
from rl_core.api.job import RLJobSpec
from rl_core.plan.model_facts import ModelFacts
from rl_core.plan.trainer_memory import CHUNK, trainer_phases
from tests.actor_samples import make_model, make_record, make_spec
from tests.integration.fsdp_rank import Rank

LENGTH, PROMPT, VOCABULARY = 128, 8, 2000
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
CASES = {
    f"{backend} {dtype}{' recomputed' * again}": {
        "actor__backend": backend,
        "model__dtype": dtype,
        "actor__gradientCheckpointing": again,
    }
    for backend in ("fsdp2", "megatron")
    for dtype in ("float32", "bfloat16")
    for again in (False, True)
}
CASES |= {
    f"{backend} {dtype} selective{' adapters' * bool(lora)}": {
        "actor__backend": backend,
        "model__dtype": dtype,
        "actor__gradientCheckpointing": True,
        "actor__gradientCheckpointingMode": "selective",
    }
    | lora
    for backend, dtype, lora in (
        ("fsdp2", "float32", {}),
        ("fsdp2", "bfloat16", {"model__lora": {"rank": 8}}),
        ("megatron", "bfloat16", {}),
    )
}
CASES |= {
    f"{backend} bfloat16 float32 head": {
        "actor__backend": backend,
        "model__dtype": "bfloat16",
        "model__float32Head": True,
    }
    for backend in ("fsdp2", "megatron")
}
CASES |= {
    f"{backend} float32 eager": {"actor__backend": backend, "actor__attention": "eager"}
    for backend in ("fsdp2", "megatron")
}
CASES |= {
    f"fsdp2 {dtype} adapters{' of two layers' * (targets is not None)}": {
        "model__dtype": dtype,
        "model__lora": {"rank": 8} | ({} if targets is None else {"targets": targets}),
    }
    for dtype, targets in (("float32", None), ("bfloat16", None), ("float32", ["q_proj", "v_proj"]))
}
HEAD_NORMS = {
    f"{backend} {dtype}{' adapters' * bool(lora)}": {"actor__backend": backend, "model__dtype": dtype} | lora
    for backend, lora in (("fsdp2", {}), ("megatron", {}), ("fsdp2", {"model__lora": {"rank": 8}}))
    for dtype in ("float32", "bfloat16")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """Half as wide layers, so that the norms of heads are a larger part."""
    folder = tmp_path_factory.mktemp("qwen3")
    return make_model(folder, family="qwen3", head_dim=32, **SHAPE | {"intermediate_size": 160})


def full_record(group: int):
    """Return a group of four rows of LENGTH tokens each."""
    rng, record = np.random.default_rng(group), make_record(group)
    prompt = [{"role": "user", "content": "", "token_ids": torch.tensor(rng.integers(0, VOCABULARY, PROMPT))}]
    completions = []
    for completion in record.completions:
        answer = {
            "role": "assistant",
            "content": "",
            "token_ids": torch.tensor(rng.integers(0, VOCABULARY, LENGTH - PROMPT)),
            "generation_logprobs": torch.tensor(rng.normal(-3, 0.2, LENGTH - PROMPT), dtype=torch.float32),
        }
        completions.append(replace(completion, message_log=[*prompt, answer], reward=float(rng.integers(0, 3))))
    return replace(record, prompt=prompt, completions=completions)


def spec_of(model: Path, **changes) -> dict:
    full = {
        "actor__microBatchTokens": CHUNK,
        "rollout__maxSequenceLength": LENGTH,
        "rollout__sampling": {"maxNewTokens": LENGTH - PROMPT},
    }
    return make_spec(model, **full | changes)


def train(actor) -> None:
    actor.load_batch([full_record(group) for group in (0, 1, 2, 4)])
    actor.compute_log_probs()
    actor.compute_advantages_and_returns()
    actor.run_training(1)


class Meter:
    """Bytes that torch's CPU allocator has given out since the meter was made, as far as it is run under it."""

    def __init__(self) -> None:
        self.held = 0

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most that was held while `run` ran."""
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
            gc.collect()
        events, found = list(seen.profiler.kineto_results.experimental_event_tree()), []
        while events:
            event = events.pop()
            events += event.children
            if event.tag == _EventType.Allocation:
                found.append((event.start_time_ns, event.extra_fields.alloc_size))
        held = list(
            itertools.accumulate((size for _, size in sorted(found, key=lambda one: one[0])), initial=self.held)
        )
        self.held = held[-1]
        return max(held)


@pytest.mark.parametrize("changes", HEAD_NORMS.values(), ids=HEAD_NORMS)
def test_the_estimate_counts_the_norms_of_heads(qwen3, changes):
    check_estimate(qwen3, changes)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_estimate_of_each_phase_is_what_is_allocated(model, changes):
    check_estimate(model, changes)


def check_estimate(model, changes):
    spec, meter, ranks = spec_of(model, **changes), Meter(), []
    meter.peak(lambda: ranks.append(Rank(spec, [[]], 0, 1)))
    (actor,) = (rank.actor for rank in ranks)
    measured = {"idle": meter.held}
    row = list(range(1, LENGTH + 1)) * 8
    if (
        actor.cfg.actor.attention != "eager"
    ):  # its memory grows with the square of this row, which is longer than those of the job
        measured["logprob"] = meter.peak(lambda: actor.score(row, 1))
    measured["train"] = meter.peak(lambda: train(actor))
    phases = trainer_phases(RLJobSpec.model_validate(spec), ModelFacts.from_config(model))
    print({name: round(measured[name] / sum(phases[name].values()), 3) for name in measured})
    assert {name: sum(phases[name].values()) for name in measured} == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_no_part_of_the_model_is_copied_on_its_device_to_be_saved_or_published(model, tmp_path, backend):
    """A version that is published needs no more than two buckets, here of one matrix each."""
    manager = Rank(spec_of(model, actor__backend=backend), [[]], 0, 1).actor.manager
    matrix = 4 * SHAPE["hidden_size"] * SHAPE["intermediate_size"]

    def publish() -> None:
        source = manager.version_source("float32", 1)
        for _ in source.buckets("cpu"):
            pass

    assert Meter().peak(lambda: manager.save_checkpoint(str(tmp_path))) < matrix / 4
    assert Meter().peak(publish) < 2 * matrix


def test_logits_of_one_chunk_exist_at_a_time_backwards_too():
    def score(chunks: int) -> None:
        hidden = torch.randn(1, chunks * CHUNK + 1, 8, requires_grad=True)
        weight = torch.randn(VOCABULARY, 8, requires_grad=True)
        ids = torch.randint(VOCABULARY, hidden.shape[:2])
        hidden_scores(hidden, weight, ids, chunk_size=CHUNK).log_probs.sum().backward()

    score(1)
    one, three = (Meter().peak(partial(score, chunks)) for chunks in (1, 3))
    assert three < 1.3 * one


def test_a_device_with_too_little_memory_is_refused_by_the_trainers_process(model):
    spec = RLJobSpec.model_validate(spec_of(model, actor__gpus=1))
    check_memory(spec, 8 * 2**30)
    with pytest.raises(CapacityError, match=r"role actor, phase \w+: needs .* of device memory, got 1\.00 GiB"):
        check_memory(spec, 2**30)


class Largest(TorchDispatchMode):
    """Remembers the most float32 logits that any operation gave."""

    logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and VOCABULARY in tensor.shape:
                self.logits = max(self.logits, tensor.numel() if SHAPE["hidden_size"] not in tensor.shape else 0)
        return result


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_no_pass_holds_float32_logits_of_more_tokens_than_a_chunk(model, backend):
    changes = {"actor__backend": backend, "actor__microBatchTokens": 2 * CHUNK, "algorithm__recomputeLogProbs": True}
    actor = Rank(spec_of(model, **changes), [[]], 0, 1).actor
    with Largest() as seen:
        train(actor)
    assert VOCABULARY <= seen.logits <= CHUNK * VOCABULARY
