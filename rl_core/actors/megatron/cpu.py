"""Runs megatron-core 0.16 on a CPU by answering every request for the device `cuda` with the CPU.

`cpu_as_cuda()` is entered inside each method of an actor and left again. It changes torch functions for the calling thread, and
`torch.cuda` for the process. It refuses to run where CUDA is available. The computation is megatron's own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SETTINGS = {
    "use_cpu_initialization": True,
    "batch_p2p_comm": False,
    "batch_p2p_sync": False,
    # Freeing an output while gloo still sends it gives NaN.
    "deallocate_pipeline_outputs": False,
}
"""Values that a TransformerConfig must have on a CPU."""
OPTIMIZER_FOLDER = "/megatron/core/optimizer/"
"""Code that compares a tensor's type with the names of CUDA types."""

helped: set[str] | None = None
"""When a set: the megatron functions that got help, as `file.function`. A test holds the list, so that an upgrade shows what changed."""


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Run megatron-core on the CPU inside the block. Raises RuntimeError where CUDA is available."""
    if torch.cuda.is_available():
        raise RuntimeError("cpu_as_cuda is for machines without CUDA, got one with it; train there without")
    saved = [(module, name, getattr(module, name)) for module, name, _ in _replacements()]
    try:
        for module, name, replacement in _replacements():
            setattr(module, name, replacement)
        with _CudaIsCpu():
            yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)


class _CudaIsCpu(TorchFunctionMode):  # type: ignore[misc]
    """Replaces the device `cuda` by the CPU in the arguments of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            _note()
            return args[0]
        if func is Tensor.pin_memory:
            _note()
            return args[0].clone()  # callers empty the original's storage: it must be a copy
        if func is Tensor.type and len(args) == 1 and not kwargs:
            name = func(args[0])
            if OPTIMIZER_FOLDER not in sys._getframe(1).f_code.co_filename:
                return name
            _note()
            return name.replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            _note()
            kwargs = kwargs | {"device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            _note()
            kwargs = kwargs | {"pin_memory": False}
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            _note()
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return device.startswith("cuda") if isinstance(device, str) else getattr(device, "type", None) == "cuda"


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return (module, name of the attribute, replacement)."""
    from megatron.core.tensor_parallel import random

    def helping(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _note()
            return answer(*args, **kwargs)

        return call

    current = helping(lambda: torch.device("cpu"))
    nothing = helping(lambda *_args, **_kwargs: None)
    get_state = helping(lambda *_args, **_kwargs: torch.get_rng_state())
    set_state = helping(lambda state, *_args, **_kwargs: torch.set_rng_state(state))
    return [
        (torch.cuda, "current_device", current),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "empty_cache", nothing),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "set_rng_state", set_state),
        (torch.cuda, "manual_seed", helping(torch.manual_seed)),
        (random, "_get_cuda_rng_state", get_state),
        (random, "_set_cuda_rng_state", set_state),
        # It would exchange the state of the CPU's generator, which megatron leaves alone on a device.
        (random.CudaRNGStatesTracker, "fork", helping(lambda *_args, **_kwargs: nullcontext())),
    ]


def _note() -> None:
    """Remember the innermost function of megatron-core on the stack."""
    if helped is None:
        return
    frame: Any = sys._getframe(1)
    while frame is not None and "/megatron/core/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is not None:
        file = frame.f_code.co_filename.rpartition("/megatron/core/")[2].removesuffix(".py")
        helped.add(f"{file}.{frame.f_code.co_name}")
