"""torch.compile of decoder layers, one by one (`actor.compile`)."""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rl_core.actors import attention, hf
from rl_core.api.errors import ConfigError

BACKEND = "inductor"
"""Backend of torch.compile."""


@functools.cache
def _uncompiled_attention() -> Callable[..., Any]:
    """Return attention that torch.compile leaves alone. There is one, so that layers of several models share their code."""
    uncompiled: Callable[..., Any] = torch.compiler.disable(attention.packed_attention)
    return uncompiled


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer of `model` in place, for any number of tokens. Must be called before the model is wrapped.

    The layers have one code, so that it is compiled once and not once per layer. Attention is left out: its kernels need no fusion, and the
    layout of the rows, which differs in every micro-batch, would be compiled into the code. Raises ConfigError without a C++ compiler, which
    the code for CPUs and the launchers of kernels for GPUs need.
    """
    names = [os.environ.get("CXX") or "g++", "clang++"]
    if not any(map(shutil.which, names)):
        raise ConfigError(
            f"actor.compile needs a C++ compiler on the trainer's machine, found none of {', '.join(names)}; add one to the image, or remove "
            "actor.compile"
        )
    attention.register(_uncompiled_attention())
    layers = hf.decoder_layer_classes(model)
    for module in model.modules():
        if isinstance(module, layers):
            module.compile(backend=BACKEND, dynamic=True)
