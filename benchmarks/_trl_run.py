"""One GRPOTrainer run on the task of `_letters`, in one process; writes its times and rewards as JSON. Run by trl_side_by_side."""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import _letters
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Tells the end of each step at once, as a line in `path`, and keeps the rewards."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self.rewards: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self._file.write(f"{time.time()}\n")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in (logs or {}):
            self.rewards.append(float(logs["reward"]))


def timed(owner, name: str, seconds: dict[str, list[float]], label: str) -> None:
    """Replace owner.name by itself with a clock."""
    method = getattr(owner, name)

    def call(*args, **kwargs):
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[label].append(time.perf_counter() - started)

    setattr(owner, name, call)


def settings(folder: Path, seed: int, steps: int, size: _letters.Size) -> GRPOConfig:
    """Return the settings of the recipe."""
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=size.rows,
        gradient_accumulation_steps=1,
        num_generations=size.group_size,
        steps_per_generation=1,
        num_iterations=1,
        max_completion_length=size.max_new_tokens,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        importance_sampling_level="token",
        mask_truncated_completions=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=size.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=1.0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        gradient_checkpointing=False,
        use_vllm=False,
        use_transformers_continuous_batching=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    """Train and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--size", choices=_letters.SIZES, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    sys.path.insert(0, str(options.folder))
    from reward import letter_a

    rows = [json.loads(line) for line in (options.folder / "data" / "train.jsonl").read_text().splitlines()]
    clock, seconds = Clock(options.folder / "trl-steps.txt"), defaultdict(list)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(options.folder / "model"),
        reward_funcs=letter_a,
        args=settings(options.folder, options.seed, options.steps, _letters.SIZES[options.size]),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[clock],
    )
    timed(trainer, "_generate", seconds, "generation")
    timed(trainer, "compute_loss", seconds, "forward")
    timed(trainer.accelerator, "backward", seconds, "backward")
    trainer.train()
    report = {"rewards": clock.rewards, "parts": seconds}
    options.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
