"""Scores from hidden states against float64 log_softmax, forwards and backwards."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.logprobs import hidden_scores, scored_tokens
from rl_core.algorithms.score_functions import VocabularyShard


def scores_of_logits(logits, input_ids, **options):
    """Score `logits`, as hidden states of an output layer that changes nothing."""
    return hidden_scores(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), input_ids, **options)


def reference(logits, input_ids, temperature, starts=()):
    """(log-probabilities, entropies) [B, S] in float64 by the definition."""
    rows, width, _ = logits.shape
    logp = torch.log_softmax(logits / temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    zero = torch.zeros(rows, 1, dtype=torch.float64)
    found = [torch.cat((zero, values), 1)[:, :width] for values in (chosen, entropy[:, :-1])]
    first = torch.zeros(rows, width, dtype=torch.bool)
    first[:, list(starts)] = True
    return tuple(torch.where(first, 0.0, values) for values in found)


def compare_gradients(scores, expected, leaves, double_leaves, *, atol):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(expected[0].shape, generator=generator) for _ in range(2)]
    sum((w * s).sum() for w, s in zip(weights, scores, strict=True) if s is not None).backward()
    sum((w * s).sum() for w, s in zip(weights, expected, strict=True)).backward()
    for leaf, double in zip(leaves, double_leaves, strict=True):
        torch.testing.assert_close(leaf.grad.double(), double.grad, atol=atol, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(2, 40)),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    chunk_size=st.sampled_from([1, 3, 1024]),
    entropy=st.booleans(),
)
def test_scores_and_gradients_equal_the_definition(seed, shape, temperature, chunk_size, entropy):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(shape, generator=generator)).requires_grad_()
    input_ids = torch.randint(0, shape[2], shape[:2], generator=generator)
    double = logits.detach().double().requires_grad_()
    expected = reference(double, input_ids, temperature)
    scores = scores_of_logits(logits, input_ids, temperature=temperature, chunk_size=chunk_size, entropy=entropy)
    torch.testing.assert_close(scores.log_probs.double(), expected[0], atol=2e-6, rtol=1e-6)
    if entropy:
        torch.testing.assert_close(scores.entropy.double(), expected[1], atol=2e-6, rtol=1e-6)
    else:
        assert scores.entropy is None
        expected = (expected[0], expected[1] * 0)
    compare_gradients((scores.log_probs, scores.entropy), expected, [logits], [double], atol=2e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([1.0, 0.6]), chunk_size=st.sampled_from([2, 1024]))
def test_hidden_scores_equal_projection_then_scores(seed, temperature, chunk_size):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 6, 5, generator=generator).requires_grad_()
    weight = torch.randn(30, 5, generator=generator).requires_grad_()
    input_ids = torch.randint(0, 30, (2, 6), generator=generator)
    mask = torch.rand(2, 6, generator=generator) > 0.4
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    used = mask.clone()
    used[:, 0] = False
    expected = [used * values for values in reference(doubles[0] @ doubles[1].T, input_ids, temperature)]
    scores = hidden_scores(
        hidden,
        weight,
        input_ids,
        temperature=temperature,
        targets=scored_tokens(mask),
        chunk_size=chunk_size,
        entropy=True,
    )
    torch.testing.assert_close(scores.log_probs.double(), expected[0], atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(scores.entropy.double(), expected[1], atol=5e-6, rtol=1e-6)
    compare_gradients((scores.log_probs, scores.entropy), expected, [hidden, weight], doubles, atol=2e-5)


def test_no_shift_crosses_a_packed_segment():
    logits = torch.randn(1, 9, 11)
    input_ids = torch.randint(0, 11, (1, 9))
    bounds = torch.tensor([0, 4, 5, 9, 9], dtype=torch.int32)
    targets = scored_tokens(torch.ones(1, 9, dtype=torch.bool), bounds)
    packed = scores_of_logits(logits, input_ids, targets=targets).log_probs
    apart = [scores_of_logits(logits[:, a:b], input_ids[:, a:b]).log_probs for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(packed, torch.cat(apart, 1))
    assert packed[0, [0, 4, 5]].tolist() == [0.0, 0.0, 0.0]
    entropy = scores_of_logits(logits, input_ids, targets=targets, entropy=True).entropy
    assert entropy[0, [0, 4, 5]].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(
        entropy.double(), reference(logits.double(), input_ids, 1.0, (4, 5))[1], atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("entropy", [False, True])
def test_candidates_are_scored_in_the_place_of_each_token(entropy):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 6, 5, generator=generator).requires_grad_()
    weight = torch.randn(30, 5, generator=generator).requires_grad_()
    input_ids = torch.randint(0, 30, (2, 6), generator=generator)
    candidates = torch.randint(0, 30, (2, 6, 4), generator=generator)
    candidates[..., 0] = input_ids  # the token itself may be one of them
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    logp = torch.log_softmax(doubles[0] @ doubles[1].T / 0.7, -1)[:, :-1]
    expected = torch.cat([torch.zeros(2, 1, 4, dtype=torch.float64), logp.gather(-1, candidates[:, 1:])], dim=1)
    options = {"temperature": 0.7, "chunk_size": 4, "entropy": entropy}
    scores = hidden_scores(hidden, weight, input_ids, candidates=candidates, **options)
    torch.testing.assert_close(scores.candidates.double(), expected, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(scores.candidates[..., 0], scores.log_probs)
    factors = torch.randn(2, 6, 4, generator=generator)
    ((scores.candidates * factors).sum() + scores.log_probs.sum()).backward()
    ((expected * factors).sum() + expected[..., 0].sum()).backward()
    for leaf, double in zip((hidden, weight), doubles, strict=True):
        torch.testing.assert_close(leaf.grad.double(), double.grad, atol=2e-5, rtol=0)


def test_ranks_with_half_of_the_vocabulary_each_score_candidates_like_one():
    """Threads stand for the ranks; the first has one padding row."""
    generator = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(1, 7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    input_ids, candidates = torch.randint(0, 11, (1, 7)), torch.randint(0, 11, (1, 7, 3))
    barrier, held = threading.Barrier(2, timeout=30), {}

    def exchange(rank, tensor, join):
        held[rank] = tensor.clone()
        barrier.wait()
        tensor.copy_(join(torch.stack([held[0], held[1]])))
        barrier.wait()

    def run(rank):
        own = weight[rank * 6 : rank * 6 + 6]
        part = torch.cat([own, torch.zeros(6 - len(own), 5)]).requires_grad_()
        shard = VocabularyShard(
            start=rank * 6,
            tokens=len(own),
            largest=lambda tensor: exchange(rank, tensor, lambda both: both.amax(0)),
            total=lambda tensor: exchange(rank, tensor, lambda both: both.sum(0)),
        )
        leaf = hidden.clone().requires_grad_()
        scores = hidden_scores(leaf, part, input_ids, candidates=candidates, entropy=True, shard=shard)
        (scores.candidates.sum() + scores.entropy.sum()).backward()
        return scores, leaf.grad

    leaf = hidden.clone().requires_grad_()
    whole = hidden_scores(leaf, weight, input_ids, candidates=candidates, entropy=True)
    (whole.candidates.sum() + whole.entropy.sum()).backward()
    with ThreadPoolExecutor(2) as pool:
        for scores, gradient in pool.map(run, range(2)):
            for name in ("log_probs", "entropy", "candidates"):
                torch.testing.assert_close(getattr(scores, name), getattr(whole, name))
            torch.testing.assert_close(gradient, leaf.grad)


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(2, 5, 300).bfloat16().requires_grad_()
    input_ids = torch.randint(0, 300, (2, 5))
    found = scores_of_logits(logits, input_ids).log_probs
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference(logits.double(), input_ids, 1.0)[0], atol=2e-6, rtol=0)
    found.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_half_precision_weight_gradient_is_summed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 65, 4).bfloat16(), torch.randn(20, 4).bfloat16()
    input_ids = torch.randint(0, 20, (1, 65))
    gradients = []
    for chunk_size in (1, 64):
        leaf = weight.clone().requires_grad_()
        hidden_scores(hidden, leaf, input_ids, chunk_size=chunk_size).log_probs.sum().backward()
        gradients.append(leaf.grad.float())
    # One rounding to bfloat16 at the end, not one per chunk.
    torch.testing.assert_close(gradients[0], gradients[1], atol=0.05, rtol=0.02)


def test_impossible_tokens_and_huge_logits_stay_finite():
    logits = torch.tensor([[[1e4, -1e4, -3e38], [0.0, 0.0, 0.0]]], requires_grad=True)
    scores = scores_of_logits(logits, torch.tensor([[0, 0]]), entropy=True)
    assert scores.log_probs[0, 1].item() == 0.0 and scores.entropy[0, 1].item() == 0.0
    (scores.log_probs + scores.entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_logits_are_not_changed_and_unscored_positions_get_no_gradient():
    logits = torch.randn(2, 4, 7, requires_grad=True)
    before = logits.detach().clone()
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    scores = scores_of_logits(
        logits, torch.zeros(2, 4, dtype=torch.int64), temperature=0.5, targets=scored_tokens(mask)
    )
    scores.log_probs.sum().backward()
    assert torch.equal(logits.detach(), before)
    assert scores.log_probs.bool().tolist() == [[False, False, True, False], [False] * 4]
    assert logits.grad.abs().sum(-1).bool().tolist() == [[False, True, False, False], [False] * 4]


def test_all_masked_batch_backpropagates_zeros():
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    input_ids, mask = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.bool)
    hidden_scores(hidden, weight, input_ids, targets=scored_tokens(mask), entropy=True).log_probs.sum().backward()
    assert hidden.grad.abs().sum().item() == 0.0 and weight.grad.abs().sum().item() == 0.0
    assert scores_of_logits(torch.zeros(0, 3, 5), torch.zeros(0, 3, dtype=torch.int64)).log_probs.shape == (0, 3)


def test_frozen_output_layer_gets_no_gradient_and_hidden_does():
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4)
    hidden_scores(hidden, weight, torch.zeros(1, 3, dtype=torch.int64)).log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_no_float32_copy_of_all_logits_is_made():
    """Counted in elements of every tensor autograd keeps and of the largest one made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        float32_elements = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    Largest.float32_elements = max(Largest.float32_elements, tensor.numel())
            return result

    logits = torch.randn(2, 64, 50).bfloat16().requires_grad_()
    input_ids = torch.randint(0, 50, (2, 64))
    with Largest():
        scores_of_logits(logits, input_ids, temperature=0.7, chunk_size=8, entropy=True).log_probs.sum().backward()
    assert Largest.float32_elements <= 8 * 50


def test_mistakes_are_named():
    logits, input_ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature must be positive"):
            scores_of_logits(logits, input_ids, temperature=temperature)
    with pytest.raises(ValueError, match="chunk_size"):
        scores_of_logits(logits, input_ids, chunk_size=0)
    with pytest.raises(ValueError, match=r"input_ids and hidden.*\(2, 2\) and \(2, 3\)"):
        scores_of_logits(logits, input_ids[:, :2])
    with pytest.raises(ValueError, match="one packed row"):
        scored_tokens(input_ids.bool(), torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="hidden and weight"):
        hidden_scores(logits, torch.zeros(7, 5).half(), input_ids)
    with pytest.raises(TypeError, match="mask must be bool"):
        scored_tokens(input_ids)
