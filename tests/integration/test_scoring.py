"""What a pass that only scores does less than one that trains."""

from types import SimpleNamespace

import pytest
import torch

from rl_core.algorithms import logprobs
from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_rank import Rank


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_scoring_is_done_in_the_models_type_without_entropies_and_gradients(tmp_path, monkeypatch, backend):
    spec = make_spec(make_model(tmp_path), actor__backend=backend, model__dtype="bfloat16")
    rank = Rank(spec | {"algorithm": spec["algorithm"] | {"recomputeLogProbs": True}}, [[0, 1, 2, 3]], 0, 1)
    plain, passes = logprobs.ScoresFromHidden.apply, []

    def apply(hidden, weight, labels, temperature, chunk_size, entropy, shard):
        passes.append((hidden.dtype, weight.dtype, entropy, hidden.requires_grad))
        return plain(hidden, weight, labels, temperature, chunk_size, entropy, shard)

    monkeypatch.setattr(logprobs, "ScoresFromHidden", SimpleNamespace(apply=apply))
    rank.train(1)
    scored, trained = ((torch.bfloat16, torch.bfloat16, training, training) for training in (False, True))
    half = len(passes) // 2
    assert half > 1 and passes == [scored] * half + [trained] * half
