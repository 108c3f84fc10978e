"""The random state of a process as plain data, saved with a checkpoint so that a resumed run draws the same numbers."""

import base64
import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's CPU and every visible accelerator's generator, JSON-able."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "accelerators": [
            _text(state) for state in (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])
        ],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to what `capture_rng` returned; accelerator states beyond the visible devices are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_state(state["torch"]))
    for device, text in zip(range(torch.cuda.device_count()), state["accelerators"], strict=False):
        torch.cuda.set_rng_state(_state(text), device)


def derive_rng(seed: int, step: int, rank: int) -> None:
    """Seed all generators from (seed, step, rank), for a rank that has no saved state of its own."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3, np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1] & 0xFFFFFFFF))
    torch.manual_seed(int(words[2] >> np.uint64(1)))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
