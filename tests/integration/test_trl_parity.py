"""One optimisation step on an identical batch: TRL's GRPOTrainer and ours must give the same gradient to 1e-6.

The trainer is built once on a two-layer model and only its loss is called, on a batch that covers its cases: rows of
unequal length, old log-probabilities far enough away to be clipped on both sides, advantages of both signs. TRL runs as
in training with one accumulation step; ours cuts the batch into three micro-batches. The same batch then goes through the actor of every
backend as records, from YAML; what its optimizer took is the gradient. All on the CPU.
"""

import warnings
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor

from rl_core.actors.fsdp.strategy import FSDP1Strategy, FSDP2Strategy
from rl_core.algorithms.advantages import AdvantageInputs, compute_advantages, grpo_advantages
from rl_core.algorithms.aggregation import count_normalizers
from rl_core.algorithms.logprobs import hidden_scores, scored_tokens
from rl_core.algorithms.losses import LossInputs, compute_policy_loss
from rl_core.algorithms.stats import merge_stats
from rl_core.api.backends import TRAINERS
from rl_core.api.records import Completion, PromptGroupRecord

VOCABULARY, ROWS, PROMPT, COMPLETION = 48, 8, 6, 10
EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28

REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.5, 2.0, 1.0, 1.0, -1.0])
GROUP_IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
GSPO_CLIP = {"epsilon_low": 0.03, "clip_low": 0.03, "epsilon_high": 0.04, "clip_high": 0.04}


@dataclass(frozen=True)
class Case:
    trl_loss: str
    ours: str
    aggregation: str
    name: str = "grpo"
    """Of the advantage."""
    level: str = "token"
    epsilon_low: float = EPSILON_LOW
    epsilon_high: float = EPSILON_HIGH
    clip_low: float = EPSILON_LOW
    clip_high: float = EPSILON_HIGH


CASES = {
    "grpo": Case("grpo", "ppo_clip", "seq-mean-token-mean"),
    "bnpo": Case("bnpo", "ppo_clip", "token-mean"),
    "dapo": Case("dapo", "ppo_clip", "token-mean"),
    "dr_grpo": Case("dr_grpo", "ppo_clip", "seq-mean-token-sum-norm", name="dr_grpo"),
    # TRL limits cispo's ratio above only, at epsilon_high itself.
    "cispo": Case("cispo", "cispo", "token-mean", epsilon_high=1.2, clip_low=1.0, clip_high=0.2),
    "gspo": Case("grpo", "gspo", "seq-mean-token-mean", level="sequence", **GSPO_CLIP),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
        from trl import GRPOConfig, GRPOTrainer

        words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
            pad_token="<pad>",
            eos_token="<eos>",
            unk_token="<unk>",
            padding_side="left",
        )
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
        arguments = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            seed=0,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1,
            num_generations=4,
            steps_per_generation=1,
            max_completion_length=COMPLETION,
            beta=0.0,
            temperature=0.9,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
        )
        built = GRPOTrainer(
            model=Qwen2ForCausalLM(config),
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "w3"}] * 2),
            processing_class=tokenizer,
        )
    built.current_gradient_accumulation_steps = 1
    built.model.train()
    return built


@pytest.fixture(scope="module")
def batch():
    """TRL's layout: prompts padded left, completions padded right; two groups of four rows."""
    generator = torch.Generator().manual_seed(7)
    prompt_lengths = torch.tensor([6, 6, 6, 6, 3, 3, 3, 3])
    lengths = torch.tensor([10, 4, 7, 1, 10, 10, 2, 5])
    prompt_mask = torch.arange(PROMPT) >= PROMPT - prompt_lengths.unsqueeze(1)
    completion_mask = torch.arange(COMPLETION) < lengths.unsqueeze(1)
    advantages = grpo_advantages(REWARDS, GROUP_IDS, completion_mask, eps=1e-4).advantages
    return {
        "prompt_ids": torch.randint(3, VOCABULARY, (ROWS, PROMPT), generator=generator) * prompt_mask,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": torch.randint(3, VOCABULARY, (ROWS, COMPLETION), generator=generator) * completion_mask,
        "completion_mask": completion_mask.long(),
        # One value per row, as TRL holds them: the row's first trainable token has it.
        "advantages": advantages[:, 0],
        "num_items_in_batch": completion_mask.sum(),
        "drift": 0.4 * torch.randn((ROWS, COMPLETION), generator=generator),
    }


def with_old_log_probs(trainer, batch) -> dict[str, Tensor]:
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
    attention = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
    with torch.no_grad():
        current, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, COMPLETION)
    return {name: value for name, value in batch.items() if name != "drift"} | {
        "old_per_token_logps": current + batch["drift"]
    }


def trl_gradients(trainer, batch, case: Case) -> tuple[float, list[Tensor]]:
    trainer.loss_type, trainer.importance_sampling_level = case.trl_loss, case.level
    trainer.epsilon_low, trainer.epsilon_high = case.epsilon_low, case.epsilon_high
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in trainer.model.parameters()]


def our_gradients(trainer, batch, case: Case, *, rows: list[slice], fused: bool) -> tuple[float, float, list[Tensor]]:
    """Our own path from the model's output on: (loss, share of clipped tokens, gradients), summed over micro-batches."""
    model = trainer.model
    model.zero_grad()
    full = {
        "ids": torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1),
        "attention": torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1),
        "mask": torch.cat((torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]), 1).bool(),
    }
    padded = torch.nn.functional.pad(batch["old_per_token_logps"], (PROMPT, 0), value=float("nan"))
    normalizers = count_normalizers(full["mask"])
    total, metrics = 0.0, []
    for part in rows:
        ids, attention, mask = (full[name][part] for name in ("ids", "attention", "mask"))
        if fused:
            hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state
            scores = hidden_scores(
                hidden, model.lm_head.weight, ids, temperature=0.9, targets=scored_tokens(mask), chunk_size=7
            )
        else:
            logits = model(input_ids=ids, attention_mask=attention).logits
            scores = hidden_scores(logits, torch.eye(logits.shape[-1]), ids, temperature=0.9)
        inputs = LossInputs(
            log_probs=scores.log_probs,
            old_log_probs=padded[part],
            advantages=torch.where(mask, batch["advantages"][part].unsqueeze(1), float("nan")),
            mask=mask,
            normalizers=normalizers,
            max_tokens=COMPLETION,
            aggregation=case.aggregation,
        )
        result = compute_policy_loss(case.ours, inputs, clip_low=case.clip_low, clip_high=case.clip_high)
        result.loss.backward()
        total += result.loss.item()
        metrics.append(result.metrics)
    return (
        total,
        float(merge_stats(metrics)["clip_fraction"]),
        [parameter.grad.clone() for parameter in model.parameters()],
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "hidden"])
def test_one_step_gradient_equals_trl(trainer, batch, name, fused):
    case = CASES[name]
    inputs = with_old_log_probs(trainer, batch)
    their_loss, theirs = trl_gradients(trainer, inputs, case)
    our_loss, clipped, ours = our_gradients(
        trainer, inputs, case, rows=[slice(0, 1), slice(1, 6), slice(6, 8)], fused=fused
    )
    assert our_loss == pytest.approx(their_loss, abs=1e-6)
    assert clipped > 0.05
    assert max(gradient.abs().max() for gradient in theirs) > 1e-3
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, atol=1e-6, rtol=0)


STRATEGIES = {"fsdp1": FSDP1Strategy, "fsdp2": FSDP2Strategy}


@pytest.fixture(scope="module")
def folder(trainer, tmp_path_factory):
    """The trainer's model as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("model")
    trainer.model.save_pretrained(path)
    return path


def spec_of(folder, backend: str, case: Case) -> dict:
    """Return the job that trains as `case` does: no clipping of the norm, and a first moment that is the gradient."""
    loss = {"name": case.ours, "aggregation": case.aggregation, "clipLow": case.clip_low, "clipHigh": case.clip_high}
    optimizer = {"learningRate": 1e-6, "betas": [0.0, 0.999]}
    return {
        "model": {"path": str(folder)},
        "data": {"train": "unused.jsonl"},
        "algorithm": {"name": case.name, "promptsPerStep": 2, "groupSize": 4, "loss": loss},
        "actor": {"backend": backend, "optimizer": optimizer, "gradClip": None, "microBatchTokens": 40},
        "rollout": {"maxSequenceLength": 32, "sampling": {"temperature": 0.9, "maxNewTokens": COMPLETION}},
    }


def records_of(inputs) -> list[PromptGroupRecord]:
    """Return TRL's batch as the groups that rollouts send."""

    def message(role: str, ids: Tensor, **more) -> dict:
        return {"role": role, "content": "", "token_ids": ids, **more}

    def real(kind: str, row: int) -> Tensor:
        return inputs[f"{kind}_ids"][row][inputs[f"{kind}_mask"][row].bool()]

    def completion(row: int) -> Completion:
        answer = real("completion", row)
        old = inputs["old_per_token_logps"][row, : len(answer)]
        log = [message("user", real("prompt", row)), message("assistant", answer, generation_logprobs=old)]
        return Completion(message_log=log, reward=float(REWARDS[row]))

    rows = [(group == GROUP_IDS).nonzero().flatten().tolist() for group in (0, 1)]
    return [
        PromptGroupRecord(
            prompt_idx=group,
            prompt=[message("user", real("prompt", members[0]))],
            extra_env_info=None,
            metadata={},
            completions=[completion(row) for row in members],
            group_id=f"0-{group}",
        )
        for group, members in enumerate(rows)
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", TRAINERS)
def test_every_backend_takes_the_gradient_of_trl(trainer, batch, folder, monkeypatch, backend, name):
    case, (module, _, actor_class) = CASES[name], TRAINERS[backend].partition(":")
    if backend in STRATEGIES:  # one rank has a plain model otherwise
        monkeypatch.setattr(STRATEGIES[backend], "is_sharded", property(lambda self: True))
    one_prompt = batch | {"prompt_ids": batch["prompt_ids"][GROUP_IDS * 4]}
    advantages = compute_advantages(
        case.name, AdvantageInputs(mask=batch["completion_mask"].bool(), group_ids=GROUP_IDS, rewards=REWARDS)
    ).advantages
    inputs = with_old_log_probs(trainer, one_prompt | {"advantages": advantages[:, 0]})
    _, theirs = trl_gradients(trainer, inputs, case)
    actor = getattr(import_module(module), actor_class)(spec_of(folder, backend, case))
    actor.init_worker()
    actor.load_batch(records_of(inputs))
    actor.compute_advantages_and_returns()
    metrics = actor.run_training()
    assert metrics["actor/clip_fraction"] > 0.05
    taken = {
        part.removesuffix(".exp_avg"): one
        for part, one in actor.manager.moment_slices().items()
        if "exp_avg_sq" not in part
    }
    names = [name for name, _ in trainer.model.named_parameters()]
    assert taken.keys() == set(names)
    for name, gradient in zip(names, theirs, strict=True):
        mine = torch.cat([part.tensor for part in taken[name]])
        torch.testing.assert_close(mine, gradient, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
