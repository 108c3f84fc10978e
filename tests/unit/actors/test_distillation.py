"""A step of distillation over a teacher's candidates has the gradient of TRL's loss on the same model."""

import torch

from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.step_engine import StepEngine
from rl_core.actors.teachers import TeacherScores
from tests import actor_samples

TOP_K = 4
TEACHER = 2 * torch.randn(actor_samples.VOCAB, actor_samples.VOCAB, generator=torch.Generator().manual_seed(11))
"""Logits of the next token by the token before it."""


def teach(batch, records):
    """Answer as the teachers of a job do."""
    scores = TEACHER.log_softmax(-1)[batch.input_ids.roll(1, dims=1)]
    top = scores.topk(TOP_K, dim=-1)
    return TeacherScores(scores.gather(-1, batch.input_ids[..., None])[..., 0], top.indices, top.values)


def test_a_step_has_the_gradient_of_trls_loss(make_spec, records, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

    algorithm = {"name": "distill", "distillation": {"teacher": "t", "topK": TOP_K}}
    group = {"name": "t", "worker": "rl_core.groups.teacher:Teacher", "callers": ["actor"]}
    spec = make_spec(algorithm={"promptsPerStep": 4, "groupSize": 4, "steps": 10} | algorithm, groups=[group])
    backend = FSDPBackend(FSDPModelManager(spec, 1, 0))
    manager = backend.manager
    manager.setup_model_and_optimizer()
    options = {"micro_batch_tokens": 64, "response_limit": 12, "teachers": teach}
    engine = StepEngine(backend, manager.ranks, spec.algorithm, **options)
    engine.load(records)
    metrics = engine.compute_advantages()
    assert not engine.prepared.advantages.any() and metrics["distill/teacher_share"] == 1.0
    batch, taken = engine.prepared.batch, {}

    def optimizer_step():
        taken.update({name: p.grad.clone() for name, p in manager.model.named_parameters()})
        manager.optimizer.zero_grad()
        return 0.0, [0.0]

    monkeypatch.setattr(manager, "optimizer_step", optimizer_step)
    trained = engine.train(1)
    values = []
    for ids, length, mask in zip(batch.input_ids, batch.lengths.tolist(), batch.loss_mask, strict=True):
        log_probs = manager.model(ids[None, :length]).logits[0, :-1].log_softmax(-1)
        teacher, candidates = TEACHER.log_softmax(-1)[ids[: length - 1]].topk(TOP_K)
        student = add_tail_bucket(log_probs.gather(-1, candidates))
        values.append(compute_divergence(student, add_tail_bucket(teacher), alpha=1.0)[mask[1:length]])
    loss = torch.cat(values).mean()
    loss.backward()
    assert abs(trained["actor/loss"] - loss.item()) < 1e-6
    assert abs(trained["actor/distill/top_k_kl"] - loss.item()) < 1e-6
    for name, parameter in manager.model.named_parameters():
        torch.testing.assert_close(taken[name], parameter.grad, atol=1e-6, rtol=0, msg=name)
