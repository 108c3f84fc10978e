"""The estimate of a trainer's memory is what both backends allocate, and no float32 copy of all logits is among it.

One rank is measured in this process, two are processes of their own: see `memory_meter`.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.actors.device import check_memory
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.objective import ValueObjective
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.logprobs import hidden_scores
from rl_core.api.critic import CriticSpec
from rl_core.api.errors import CapacityError
from rl_core.api.job import RLJobSpec
from rl_core.groups.critic import ValueBackend, step_rows
from rl_core.plan.capacity import estimate
from rl_core.plan.critic_group import critic_spec
from rl_core.plan.model_facts import ModelFacts
from rl_core.plan.trainer_memory import CHUNK
from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_ranks, scenario
from tests.integration.fsdp_rank import Rank
from tests.integration.memory_meter import LENGTH, PROMPT, VOCABULARY, Meter, measure, train

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
        ("megatron", "bfloat16", {"model__lora": {"rank": 8}}),
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
    f"{backend} {dtype} adapters{' of two layers' * (targets is not None)}": {
        "actor__backend": backend,
        "model__dtype": dtype,
        "model__lora": {"rank": 8} | ({} if targets is None else {"targets": targets}),
    }
    for backend in ("fsdp2", "megatron")
    for dtype, targets in (("float32", None), ("bfloat16", None), ("float32", ["q_proj", "v_proj"]))
}
CASES |= {
    f"{backend} {dtype} {what}": {"actor__backend": backend, "model__dtype": dtype} | changes
    for backend, dtype, what, changes in (
        (
            "fsdp2",
            "bfloat16",
            "adapters recomputed",
            {"model__lora": {"rank": 8}, "actor__gradientCheckpointing": True},
        ),
        (
            "megatron",
            "bfloat16",
            "adapters recomputed",
            {"model__lora": {"rank": 8}, "actor__gradientCheckpointing": True},
        ),
        ("fsdp2", "float32", "adapters recomputed", {"model__lora": {"rank": 8}, "actor__gradientCheckpointing": True}),
        ("fsdp2", "bfloat16", "offloaded", {"actor__offload": {"optimizer": True, "params": True, "grads": True}}),
        ("megatron", "bfloat16", "offloaded", {"actor__offload": {"optimizer": True, "params": True, "grads": True}}),
        ("fsdp2", "float32", "optimizer offloaded", {"actor__offload": {"optimizer": True}}),
        ("fsdp1", "bfloat16", "adapters", {"model__lora": {"rank": 8}}),
        ("fsdp1", "bfloat16", "all weights", {}),
    )
}
CASES |= {
    f"{backend} bfloat16 reference{' grads offloaded' * grads}": {
        "actor__backend": backend,
        "model__dtype": "bfloat16",
        "algorithm__loss": {"klCoefficient": 0.1},
        "actor__offload": {"grads": grads, "optimizer": True},
    }
    for backend in ("fsdp1", "fsdp2", "megatron")
    for grads in (False, True)
}
CASES |= {
    f"{backend} {dtype} adapters of {what}": {
        "actor__backend": backend,
        "model__dtype": dtype,
        "model__lora": {"rank": 8, "layers": layers},
    }
    | ({} if mode is None else {"actor__gradientCheckpointing": True, "actor__gradientCheckpointingMode": mode})
    for backend, dtype, what, layers, mode in (
        ("fsdp2", "float32", "the first layer", [0], None),
        ("fsdp2", "bfloat16", "late layers", [2, 3], None),
        ("fsdp2", "bfloat16", "the last layer selective", [3], "selective"),
        ("megatron", "float32", "a middle layer", [1], None),
    )
}
LLAMA = {
    "fsdp2 float32": {"actor__backend": "fsdp2"},
    "megatron bfloat16": {"actor__backend": "megatron", "model__dtype": "bfloat16"},
    "fsdp2 bfloat16 adapters recomputed": {
        "model__dtype": "bfloat16",
        "model__lora": {"rank": 8},
        "actor__gradientCheckpointing": True,
    },
}
ON_TWO_RANKS = {
    "fsdp2 float32": {},
    "fsdp2 bfloat16 adapters recomputed": {
        "model__dtype": "bfloat16",
        "model__lora": {"rank": 8},
        "actor__gradientCheckpointing": True,
    },
    "fsdp2 bfloat16 without sync": {"model__dtype": "bfloat16", "actor__accumulateWithoutSync": True},
    "fsdp1 bfloat16": {"actor__backend": "fsdp1", "model__dtype": "bfloat16"},
    "fsdp2 bfloat16 offloaded": {
        "model__dtype": "bfloat16",
        "actor__offload": {"optimizer": True, "params": True, "grads": True},
    },
    "megatron bfloat16 tensor 2": {
        "actor__backend": "megatron",
        "model__dtype": "bfloat16",
        "actor__parallel": {"tensor": 2},
    },
    "megatron float32 data 2": {"actor__backend": "megatron"},
    "megatron bfloat16 tensor 2 adapters": {
        "actor__backend": "megatron",
        "model__dtype": "bfloat16",
        "actor__parallel": {"tensor": 2},
        "model__lora": {"rank": 8},
    },
    "megatron float32 data 2 adapters": {"actor__backend": "megatron", "model__lora": {"rank": 8}},
}
"""Of Qwen3, two micro-batches each."""
WITH_EXPERTS = {
    "fsdp2 float32": {},
    "fsdp2 bfloat16 recomputed": {"model__dtype": "bfloat16", "actor__gradientCheckpointing": True},
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"), family="llama", **SHAPE)


def spec_of(model: Path, **changes) -> dict:
    full = {
        "actor__microBatchTokens": CHUNK,
        "rollout__maxSequenceLength": LENGTH,
        "rollout__sampling": {"maxNewTokens": LENGTH - PROMPT},
    }
    return make_spec(model, **full | changes)


@pytest.mark.parametrize("changes", HEAD_NORMS.values(), ids=HEAD_NORMS)
def test_the_estimate_counts_the_norms_of_heads(qwen3, changes):
    check_estimate(qwen3, changes)


@pytest.mark.parametrize("changes", WITH_EXPERTS.values(), ids=WITH_EXPERTS)
def test_the_estimate_counts_all_experts_and_what_a_token_takes_through_its_own(tmp_path, changes):
    settings = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "head_dim": 32}
    check_estimate(make_model(tmp_path, family="qwen3_moe", **SHAPE | settings), changes)


@pytest.mark.parametrize("changes", LLAMA.values(), ids=LLAMA)
def test_the_estimate_holds_for_llama(llama, changes):
    check_estimate(llama, changes)


def test_the_estimate_holds_on_two_ranks(qwen3, tmp_path):
    two = {"actor__processesPerPod": 2, "actor__microBatchTokens": CHUNK // 2}
    specs = {name: spec_of(qwen3, **two | changes) for name, changes in ON_TWO_RANKS.items()}
    scenarios = [scenario(name, spec, [["measure"]], world_size=2) for name, spec in specs.items()]
    seen = run_ranks(tmp_path, 2, scenarios)
    assert all(rank.keys() == specs.keys() for rank in seen), "a rank failed; see its output"
    wrong = []
    for name, spec in specs.items():
        measured = [rank[name]["measured"] for rank in seen]
        try:
            # Ranks are alike. A measurement may be too high, see `Meter`, and never too low.
            compare(spec, {phase: min(rank[phase] for rank in measured) for phase in measured[0]})
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_estimate_of_each_phase_is_what_is_allocated(model, changes):
    check_estimate(model, changes)


def check_estimate(model, changes):
    spec = spec_of(model, **changes)
    measured = measure(lambda: Rank(spec, [[]], 0, 1).actor)
    if spec["actor"].get("attention") == "eager":
        del measured[
            "logprob"
        ]  # its memory grows with the square of a row, and the measured one is longer than those of the job
    compare(spec, measured)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_holds_for_a_critic_in_a_group_of_its_own(qwen3, dtype):
    group = {"name": "critic", "worker": "rl_core.groups.critic:Critic", "lifecycle": "gang", "callers": ["actor"]}
    spec = spec_of(qwen3, model__dtype=dtype, algorithm__name="gae", algorithm__critic={"group": "critic"})
    spec["groups"] = [group]
    of_critic = critic_spec(RLJobSpec.model_validate(spec), group="critic")
    columns = {"input_ids": np.ones(LENGTH, np.int64), "loss_mask": np.arange(LENGTH) > PROMPT}
    columns |= {name: np.zeros(LENGTH, np.float32) for name in ("values", "returns")}
    micro_batch = step_rows([columns] * (CHUNK // LENGTH))
    objective = ValueObjective(CriticSpec(), of_critic.algorithm, max_tokens=LENGTH)
    meter, backends = Meter(), []

    def make():
        backends.append(ValueBackend(FSDPModelManager(of_critic, 1, 0)))
        backends[0].manager.setup_model_and_optimizer()

    def train_critic():
        backends[0].forward_backward([micro_batch] * 2, objective, LossNormalizers(960, 8), proceed=lambda: None)
        backends[0].manager.optimizer_step()

    meter.peak(make)
    idle = meter.held
    values = meter.peak(
        lambda: backends[0].score_rows([micro_batch], proceed=lambda: None, log_probs=False, values=True)
    )
    compare(spec, {"values": values, "train": meter.peak(train_critic), "idle": idle}, role="critic")


def compare(spec, measured, role="actor"):
    """Compare the `measured` bytes of each phase with the estimate, where the device context and the margin are left out."""
    rows = estimate(RLJobSpec.model_validate(spec), ModelFacts.from_config(spec["model"]["path"])).rows
    sizes = {
        row.phase: sum(size for part, size in row.parts.items() if part not in ("context", "margin"))
        for row in rows
        if row.role == role
    }
    sizes["train"] = max(sizes["train"], sizes.get("update", 0))
    if "idle" in measured and not sizes["idle"]:  # all is offloaded; buffers and counters are not counted
        assert measured.pop("idle") < sizes["train"] / 100
    ratios = {phase: round(sizes[phase] / size, 3) for phase, size in measured.items()}
    print(ratios)
    assert ratios == pytest.approx(dict.fromkeys(measured, 1.0), rel=0.15)


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
