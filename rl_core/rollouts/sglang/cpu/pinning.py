"""Lets SGLang's adapters (LoRA) run without an accelerator: they ask for pinned host memory, which only CUDA can give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


class _Unpinned(ModuleType):
    """The module `torch`, whose factory functions ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _unpinned(value) if name in ("tensor", "zeros", "empty") else value


def _unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    return make


def disable() -> None:
    """Let the modules of SGLang's adapters that run on a CPU take ordinary memory. Changes this process only."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _Unpinned("torch")
    torch.Tensor.pin_memory = lambda tensor: tensor
