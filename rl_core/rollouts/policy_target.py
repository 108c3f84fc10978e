"""`PolicyWeightTarget`: writes new weights into a policy module."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from rl_core.weights.storage_alias import storage_alias


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers of `model` by name. They share memory with it and have no gradient.

    A tensor that has several names is there under the first one only.
    """
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: tensor.detach() for name, tensor in (dict(model.named_parameters()) | buffers).items()}


class PolicyWeightTarget:
    """Implements `WeightTarget` and `InPlaceTarget` for a module. The module must not be called while its weights change."""

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Prepare to write into the tensors that `tensors` returns, by the names that the trainer gives them; see `saved_tensors`.

        They must share memory with the module. `tensors` is called again for each version, because a module that was moved to another device
        and back has other tensors. Their names, shapes and types must not change.
        """
        self._tensors = tensors
        self._names_and_shapes = {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors().items()
        }

    async def prepare(self, deadline: float) -> None:
        """Do nothing: the worker has paused already."""

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every tensor of the model."""
        return self._names_and_shapes

    def destinations(self) -> Mapping[str, Tensor]:
        """Return the tensors on the CPU that may be written in place."""
        return {
            name: storage_alias(tensor)
            for name, tensor in self._tensors().items()
            if tensor.device.type == "cpu" and tensor.is_contiguous()
        }

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Write every tensor; names and shapes were compared with the manifest before."""
        own_tensors = self._tensors()
        with torch.no_grad():
            for name, tensor in tensors:
                own_tensors[name].copy_(tensor)

    async def resume(self, version: int, digest: str) -> None:
        """Do nothing: the next collection acts with the new weights."""
