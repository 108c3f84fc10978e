"""What a step trains does not depend on who trains it, how many ranks there are, or how rows are cut."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.actors.backend import DetachedScores, Scores, StepCancelled
from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.schedule import OptimizerCounts
from rl_core.actors.step_engine import StepEngine
from rl_core.actors.teachers import TeacherScores
from rl_core.api.algorithm import AlgorithmSpec
from tests import actor_samples

RECORDS = [actor_samples.make_record(group) for group in range(6)]
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class Rendezvous:
    """Where the threads that stand for ranks exchange what they hold."""

    def __init__(self, size):
        self.size, self.held, self.barrier = size, {}, threading.Barrier(size, timeout=30)

    def swap(self, rank, value):
        self.held[rank] = value
        self.barrier.wait()
        found = [self.held[other] for other in range(self.size)]
        self.barrier.wait()  # nobody writes the next value before all have read this one
        return found


class ThreadRanks:
    """Data ranks that are threads of this process."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank = meeting, rank
        self.size = self.data_size = meeting.size
        self.data_rank, self.receives, self.replica_size = rank, True, 1

    def guard(self, doing):
        return nullcontext()

    def gather(self, structure):
        return self.meeting.swap(self.rank, structure)

    gather_over_data_ranks = gather

    def broadcast_in_replica(self, data):
        return data

    def all_reduce_max(self, number):
        return max(self.gather(number))

    def sum_over_data_ranks(self, tensor):
        return torch.stack(self.gather(tensor)).sum(0)

    def exchange_over_data_ranks(self, rows, counts):
        return torch.cat([parts[self.rank] for parts in self.gather(rows.split(list(counts)))])


class TinyBackend:
    """A bigram model in float64: a table of logits by the token before. Keeps each optimizer step's gradient instead of applying it."""

    max_length, hidden_size = 64, 8

    def __init__(self, has_loss=True):
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(actor_samples.VOCAB, actor_samples.VOCAB, generator=generator, dtype=torch.float64)
        self.table.requires_grad_()
        self.counts, self.has_loss = OptimizerCounts(), has_loss
        self.gradients, self.parts, self.manager = [], [], self

    def scores(self, rows):
        before = rows.columns.input_ids.roll(1, dims=1)
        logits = self.table[before].log_softmax(-1)
        log_probs = logits.gather(-1, rows.columns.input_ids[..., None])[..., 0]
        mask = rows.columns.loss_mask
        entropy = -(logits.exp() * logits).sum(-1)
        # The losses want float32; a token's own gradient is the same in any cut, and all sums are made in float64.
        found = Scores(torch.where(mask, log_probs, 0).float(), torch.where(mask, entropy, 0).float())
        candidates = rows.columns.candidates
        return found if candidates is None else found._replace(candidates=logits.gather(-1, candidates).float())

    def forward_backward(self, parts, objective, normalizers, *, proceed):
        stats = []
        for rows in parts:
            try:
                proceed()
            except StepCancelled:
                self.table.grad = None
                raise
            self.parts.append(rows)
            result = objective(self.scores(rows), rows.columns, normalizers)
            result.loss.backward()
            stats.append(result.metrics)
        return stats if self.has_loss else []

    def score_rows(self, parts, *, proceed, log_probs=True, values=False):
        assert log_probs and not values
        return [DetachedScores(self.scores(rows).log_probs.detach(), None) for rows in parts] if self.has_loss else []

    def optimizer_step(self):
        self.gradients.append(self.table.grad)
        self.table.grad = None
        self.counts.attempted += 1
        self.counts.applied += 1
        return 1.0, [0.1]

    def reference(self):
        return nullcontext()


def make_engine(backend, ranks, *, tokens=4096, ask=None, **algorithm):
    spec = AlgorithmSpec.model_validate({"promptsPerStep": len(RECORDS), "groupSize": 4, **algorithm})
    teachers = None if spec.distillation is None else teach
    options = {"micro_batch_tokens": tokens, "response_limit": 12, "teachers": teachers, "inference": ask}
    return StepEngine(backend, ranks, spec, **options)


def teach(batch, records):
    """Answer as teachers who find the next three tokens of the vocabulary likeliest."""
    candidates = (batch.input_ids[..., None] + torch.arange(1, 4)) % actor_samples.VOCAB
    log_probs = torch.tensor([0.5, 0.2, 0.1]).log().expand(candidates.shape).contiguous()
    return TeacherScores(torch.full(batch.input_ids.shape, -4.0), candidates, log_probs)


def train(engine, records=RECORDS, *, received=True):
    if received:
        engine.load(records)
    engine.compute_log_probs()
    engine.compute_advantages()
    return engine.train(1)


def step_over(num_ranks, *, tokens=4096, **algorithm):
    """Train on ranks that are threads, groups dealt in turn; return the gradient of each optimizer step over all of them, and metrics."""
    meeting, backends = Rendezvous(num_ranks), [TinyBackend() for _ in range(num_ranks)]

    def run(rank):
        engine = make_engine(backends[rank], ThreadRanks(meeting, rank), tokens=tokens, **algorithm)
        return train(engine, RECORDS[rank::num_ranks])

    with ThreadPoolExecutor(num_ranks) as pool:
        metrics = list(pool.map(run, range(num_ranks)))
    gradients = [torch.stack(parts).sum(0) for parts in zip(*(b.gradients for b in backends), strict=True)]
    return gradients, metrics, backends


def same_but_times(ours, theirs):
    names = [name for name in ours if not name.startswith(("time/", "perf/"))]
    return {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    num_ranks=st.integers(1, 3),
    tokens=st.integers(18, 200),
    optimizer_steps=st.sampled_from([1, 2]),
    aggregation=st.sampled_from(AGGREGATIONS),
    distills=st.booleans(),
)
def test_any_cut_over_ranks_and_micro_batches_gives_the_gradient_of_the_whole_batch(
    num_ranks, tokens, optimizer_steps, aggregation, distills
):
    loss = {"aggregation": aggregation, "klCoefficient": 0.1, "entropyCoefficient": 0.05}
    options = {"loss": loss, "optimizerStepsPerBatch": optimizer_steps}
    if distills:
        options |= {"name": "distill", "distillation": {"teacher": "t", "topK": 3, "rewardWeight": 0.5}}
    whole, expected, _ = step_over(1, **options)
    cut, metrics, backends = step_over(num_ranks, tokens=tokens, **options)
    assert len(cut) == len(whole) == optimizer_steps
    for ours, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert len({len(backend.parts) for backend in backends}) == 1, "ranks run equally many micro-batches"
    for of_rank in metrics:
        assert same_but_times(of_rank, expected[0])


def test_statistics_of_a_pipeline_come_from_its_last_stage_alone():
    """Two ranks that train the same rows, of which one receives them and the other has the loss: metrics are those of one rank, on both."""
    meeting = Rendezvous(2)

    class Stage(ThreadRanks):
        def __init__(self, rank):
            super().__init__(meeting, rank)
            self.data_size, self.data_rank, self.receives, self.replica_size = 1, 0, rank == 0, 2

        def broadcast_in_replica(self, data):
            return self.gather(data)[0]

        def gather_over_data_ranks(self, structure):
            return [structure]

    def run(rank):
        return train(make_engine(TinyBackend(has_loss=rank == 1), Stage(rank), **options), received=rank == 0)

    options = {"recomputeLogProbs": True, "maxPolicyKl": 0.5, "optimizerStepsPerBatch": 2}
    with ThreadPoolExecutor(2) as pool:
        first, last = pool.map(run, range(2))
    _, (alone,), _ = step_over(1, **options)
    assert same_but_times(first, alone) and same_but_times(last, alone)


def test_a_cancelled_step_leaves_no_gradient_and_no_groups():
    meeting = Rendezvous(1)
    backend = TinyBackend()
    began = []

    def progress():
        began.append(True)
        if len(began) == 2:
            engine.cancel()

    spec = AlgorithmSpec.model_validate({"promptsPerStep": len(RECORDS), "groupSize": 4})
    engine = StepEngine(
        backend, ThreadRanks(meeting, 0), spec, micro_batch_tokens=32, response_limit=12, progress=progress
    )
    assert train(engine) is None
    assert len(backend.parts) == 2 and backend.table.grad is None and engine.prepared is None
    assert backend.counts == OptimizerCounts()
    began[:] = [True] * 10
    assert train(engine)["actor/update_success"] == 1


def test_parts_hold_every_row_once_within_the_token_budget():
    _, _, (backend,) = step_over(1, tokens=40)
    assert all(sum(part.lengths) <= 40 for part in backend.parts)
    numbers = [number for part in backend.parts for number in part.numbers]
    assert sorted(numbers) == list(range(4 * len(RECORDS)))


def test_engine_and_backend_train_without_a_worker_as_they_do_in_an_actor(make_spec, make_actor):
    spec = make_spec(algorithm__promptsPerStep=len(RECORDS))
    backend = FSDPBackend(FSDPModelManager(spec, 1, 0))
    backend.manager.setup_model_and_optimizer()
    engine = StepEngine(backend, backend.manager.ranks, spec.algorithm, micro_batch_tokens=64, response_limit=12)
    actor = make_actor(algorithm__promptsPerStep=len(RECORDS))
    ours, theirs = train(engine), train(actor.engine)
    assert ours["actor/loss"] == theirs["actor/loss"] and ours["actor/grad_norm"] == theirs["actor/grad_norm"]
    assert all(map(torch.equal, backend.manager.model.parameters(), actor.manager.model.parameters()))


OLD_VERSIONS = 4
CORRECTIONS = {
    "tis": {"recomputeLogProbs": True, "importance": {"mode": "tis", "high": 1.2}},
    "icepop": {"recomputeLogProbs": True, "importance": {"mode": "icepop", "low": 0.7, "high": 1.3}},
    "decoupled_by_recompute": {"recomputeLogProbs": True, "loss": {"name": "decoupled_ppo"}},
    "decoupled_with_a_bound": {
        "recomputeLogProbs": True,
        "loss": {"name": "decoupled_ppo", "behaviorWeightMax": 1.05},
    },
    "decoupled_by_version": {"loss": {"name": "decoupled_ppo"}},
}


def aged(group):
    """Return a group that weights of version `group % 3` sampled, off the tiny model by as much as some corrections cut."""
    record = actor_samples.make_record(group)
    record.start_version = record.end_version = group % 3
    return record


def reference_loss(name, new, old, rollout, gain, age):
    """Return one token's loss in float64; `new` carries the gradient, `old` is the trainer's before the update."""
    clip = lambda r: torch.maximum(-gain * r, -gain * r.clamp(0.8, 1.2))  # noqa: E731
    if name == "tis":
        return clip((new - old).exp()) * (old - rollout).exp().clamp(0.0, 1.2)
    if name == "icepop":
        weight = (old - rollout).exp()
        return clip((new - old).exp()) * (weight if 0.7 <= weight <= 1.3 else 0.0)
    proximal = old
    if name == "decoupled_by_version":
        alpha = (age - 1) / age if age > 1 else 0.0
        proximal = rollout + alpha * (new.detach() - rollout)
    weight = (proximal - rollout).exp()
    if name == "decoupled_with_a_bound" and weight > 1.05:
        weight = 0.0
    return weight * clip((new - proximal).exp())


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_correction_of_old_tokens_has_the_gradient_of_its_formula(name, num_ranks):
    meeting, backends = Rendezvous(num_ranks), [TinyBackend() for _ in range(num_ranks)]
    options = {"maxStaleness": OLD_VERSIONS, **CORRECTIONS[name]}

    def run(rank):
        engine = make_engine(backends[rank], ThreadRanks(meeting, rank), tokens=60, **options)
        engine.load([aged(group) for group in range(6)][rank::num_ranks], version=OLD_VERSIONS)
        engine.compute_log_probs()
        engine.compute_advantages()
        batch, gains = engine.prepared.batch, engine.prepared.advantages
        return (batch, gains), engine.train(OLD_VERSIONS + 1)

    with ThreadPoolExecutor(num_ranks) as pool:
        done = list(pool.map(run, range(num_ranks)))
    model, losses = TinyBackend(), []
    for batch, gains in (prepared for prepared, _ in done):
        new = (
            model.table[batch.input_ids.roll(1, dims=1)].log_softmax(-1).gather(-1, batch.input_ids[..., None])[..., 0]
        )
        for row, token in batch.loss_mask.nonzero().tolist():
            at = (row, token)
            rollout, gain = batch.rollout_log_probs[at].double(), gains[at].double()
            age = OLD_VERSIONS - int(batch.versions[at])
            losses.append(reference_loss(name, new[at], new[at].detach(), rollout, gain, age))
    (torch.stack(losses).sum() / len(losses)).backward()
    gradient = torch.stack([backend.gradients[0] for backend in backends]).sum(0)
    torch.testing.assert_close(gradient, model.table.grad, rtol=1e-4, atol=1e-7)
    ages = {key for key in done[0][1] if key.startswith("rollout/mismatch_kl/age_")}
    assert ages == {f"rollout/mismatch_kl/age_{age}" for age in (2, 3, 4)}
    assert "mismatch/kl" not in done[0][1], "no token is of the version that trained it"


@pytest.mark.parametrize("options", [{}, {"recomputeLogProbs": True}], ids=["first-pass", "recomputed"])
def test_the_mismatch_of_a_step_is_that_before_its_first_update_over_all_ranks(options):
    """With several mini-batches and no recomputation only the first one is before the update."""
    whole = step_over(1, **options)[1][0]
    expected = {}
    backend = TinyBackend()
    engine = make_engine(backend, ThreadRanks(Rendezvous(1), 0))
    engine.load(RECORDS)
    batch = engine.prepared.batch
    difference = (engine.score(batch) - batch.rollout_log_probs)[batch.loss_mask].double()
    expected["mismatch/kl"] = float((difference.exp() - 1 - difference).mean())
    expected["mismatch/mean_abs_diff"] = float(difference.abs().mean())
    expected["mismatch/max_ratio"] = float(difference.abs().max().exp())
    expected["mismatch/share_clipped"] = float(((difference.exp() < 0.8) | (difference.exp() > 1.2)).double().mean())
    assert {key: whole[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    cut = step_over(3, tokens=40, **options)[1][0]
    assert {key: cut[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_later_updates_of_a_step_are_no_mismatch():
    one = step_over(1, updateEpochs=1)[1][0]
    two = step_over(1, updateEpochs=2)[1][0]
    assert two["mismatch/kl"] == one["mismatch/kl"]


@pytest.mark.parametrize("answering", [(True, True), (True, False), (False, False)], ids=["all", "one", "none"])
def test_old_log_probabilities_come_from_the_inference_group_or_on_all_ranks_from_the_trainer(answering):
    meeting, asked = Rendezvous(2), []

    def step(rank):
        def ask(batch, version):
            asked.append(version)
            return torch.full(batch.input_ids.shape, -0.5) if answering[rank] else None

        backend = TinyBackend()
        options = {"recomputeLogProbs": True, "inference": "inference"}
        engine = make_engine(backend, ThreadRanks(meeting, rank), ask=ask, **options)
        engine.load(RECORDS[rank::2], version=7)
        engine.compute_log_probs()
        fallbacks = float(engine.prepared.metrics["inference_fallbacks"])
        return engine.prepared.old_log_probs, engine.score(engine.prepared.collated), fallbacks

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(step, range(2)))
    assert asked == [7, 7]
    for old, own, fallbacks in found:
        assert torch.equal(old, torch.full_like(own, -0.5) if all(answering) else own)
        assert fallbacks == (not all(answering))
