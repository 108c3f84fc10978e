"""What the parts of gpu.py share: where they run, how they time, and how a model of that size looks."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

PEAKS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip
"""Part of a device's name -> dense bf16 operations per second by its data sheet; the first that fits counts."""


@dataclasses.dataclass(frozen=True)
class World:
    device: str
    """cuda:0 or cpu."""
    small: bool
    """Sizes that a CPU does in seconds."""
    folder: Path
    """Of the whole command; holds `model` once the part of that name ran."""

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def peak(self) -> float | None:
        """Return the device's bf16 operations per second; None where they are not known."""
        if not self.cuda:
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((rate for part, rate in PEAKS.items() if part in name), None)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - began

    def median(self, call: Callable[[], object], repetitions: int = 5, warm: int = 1) -> float:
        for _ in range(warm):
            call()
        return statistics.median(self.seconds(call) for _ in range(repetitions))

    def held(self) -> dict[str, int]:
        """Return what this process holds of the device, and what the device has left; nothing on a CPU."""
        if not self.cuda:
            return {}
        free, _ = torch.cuda.mem_get_info(self.device)
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "device_free": free,
        }


def rate(nbytes: float, seconds: float) -> float:
    """Return GB/s."""
    return round(nbytes / seconds / 1e9, 3)


def sizes(world: World) -> dict:
    """Return config.json of Qwen2.5-0.5B, or of a model of 60,000 parameters."""
    family = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    if world.small:
        return family | {
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 512,
        }  # fmt: skip
    return family | {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }  # fmt: skip


def make_model(world: World) -> dict:
    """Write the model's folder with random weights in bf16."""
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes(world))).to(torch.bfloat16)
    model.save_pretrained(world.model)
    (world.model / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def fill(weights, device: str) -> None:
    """Give a `DecoderWeights` random values, equal on every device."""
    generator = torch.Generator().manual_seed(0)
    shapes = weights.names_and_shapes()
    weights.load((n, (torch.randn(s, generator=generator) * 0.05).to(device)) for n, s in shapes.items())
