"""What others make of the batch of `train_step`: a padded loop of torch, TRL's GRPOTrainer, megatron-core's own loop.

Each has the same weights, rows, clipped loss, clipping of the gradient norm and AdamW; prompts and completions are as long as the records
say. `make(folder, rows)` returns a call that does one optimizer step.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Step = Callable[[], object]
RATE = 1e-6


@dataclass(frozen=True)
class Row:
    """A prompt with its completion."""

    prompt: Tensor
    answer: Tensor


@dataclass(frozen=True)
class Padded:
    """All rows padded right: [B, L]."""

    ids: Tensor
    attention: Tensor
    mask: Tensor
    """True at the tokens that train, aligned with what predicts them: [B, L - 1]."""
    old: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Padded":
        width = max(len(row.prompt) + len(row.answer) for row in rows)
        ids, attention = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for number, row in enumerate(rows):
            start, end = len(row.prompt), len(row.prompt) + len(row.answer)
            ids[number, :end] = torch.cat((row.prompt, row.answer))
            attention[number, :end] = 1
            mask[number, start:end] = True
        old = torch.full((len(rows), width - 1), -3.0)
        return cls(ids, attention, mask[:, 1:], old, torch.randn(len(rows), 1))

    def loss(self, log_probs: Tensor) -> Tensor:
        ratio = (log_probs - self.old).exp()
        losses = -torch.min(ratio * self.advantages, ratio.clamp(0.8, 1.2) * self.advantages)
        return (losses * self.mask).sum() / self.mask.sum()


def padded_loop(folder: Path, rows: Sequence[Row]) -> Step:
    """The model of transformers on rows padded right, SDPA, all logits."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    model, batch = Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="sdpa"), Padded.of(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step() -> None:
        logits = model(batch.ids, attention_mask=batch.attention).logits[:, :-1]
        batch.loss(logits.float().log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl(folder: Path, rows: Sequence[Row]) -> Step:
    """What GRPOTrainer does with a batch that is generated and scored: compute_loss, backward, clipping, its own optimizer."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(rows),
        num_generations=8,
        steps_per_generation=1,
        max_completion_length=max(len(row.answer) for row in rows),
        beta=0.0,
        loss_type="dapo",
        learning_rate=RATE,
        max_grad_norm=1.0,
        weight_decay=0.0,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w3"}] * len(rows)),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    model, optimizer = trainer.model.train(), trainer.create_optimizer()
    prompts, answers = [row.prompt for row in rows], [row.answer for row in rows]
    prompt_mask, answer_mask = _ones(prompts, "left"), _ones(answers, "right")
    batch = {
        "prompt_ids": _stacked(prompts, "left"),
        "prompt_mask": prompt_mask,
        "completion_ids": _stacked(answers, "right"),
        "completion_mask": answer_mask,
        "advantages": torch.randn(len(rows)),
        "num_items_in_batch": answer_mask.sum(),
    }

    def step() -> None:
        trainer.accelerator.backward(trainer.compute_loss(model, batch))
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return step


def _stacked(rows: Sequence[Tensor], side: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_side=side)


def _ones(rows: Sequence[Tensor], side: str) -> Tensor:
    return _stacked([torch.ones_like(row) for row in rows], side)


def megatron_loop(folder: Path, rows: Sequence[Row]) -> Step:
    """A GPTModel of megatron's own layers on rows padded right, its wrapper, schedule and optimizer; `labels` give the log-probabilities.

    Takes the process's model-parallel groups as an actor has made them.
    """
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

    from rl_core.actors.megatron import cpu, library
    from rl_core.actors.megatron.model import transformer_config

    config = Qwen2Config.from_pretrained(folder)
    with cpu.cpu_as_cuda():
        settings = transformer_config(config, architecture="Qwen2ForCausalLM", dtype=torch.float32, **cpu.SETTINGS)
        model = library.GPTModel(
            config=settings,
            transformer_layer_spec=library.get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
        wrapped = library.DistributedDataParallel(
            settings, library.DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        settings.finalize_model_grads_func = library.finalize_model_grads
        chosen = library.OptimizerConfig(
            optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=1.0, params_dtype=torch.float32
        )
        optimizer = library.get_megatron_optimizer(chosen, [wrapped], use_gloo_process_groups=False)
    batch = Padded.of(rows)
    positions = torch.arange(batch.ids.shape[1] - 1).expand(len(rows), -1)
    later = torch.ones(1, 1, positions.shape[1], positions.shape[1], dtype=torch.bool).triu(1)
    run = library.get_forward_backward_func()

    def forward(_, stage):
        losses = stage(batch.ids[:, :-1], positions, later, labels=batch.ids[:, 1:])
        return losses, lambda output: (batch.loss(-output.float()), {})

    def step() -> None:
        with cpu.cpu_as_cuda():
            run(
                forward_step_func=forward,
                data_iterator=None,
                model=[wrapped],
                num_microbatches=1,
                seq_length=positions.shape[1],
                micro_batch_size=len(rows),
                forward_only=False,
            )
            optimizer.step()
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()

    return step


PEERS: dict[str, Callable[[Path, Sequence[Row]], Step]] = {
    "trl": trl,
    "padded": padded_loop,
    "megatron_loop": megatron_loop,
}
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
