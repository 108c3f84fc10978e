"""Part of gpu.py: tensors from a worker to another by name, by each transport, beside a copy on the device."""

import statistics
import time

import torch
from _gpu_world import World, rate

from rl_core import Cluster, Worker
from rl_core.plan.placement import PackedPlacementStrategy
from rl_core.workers.tensors import TensorTransfers

SENDS = 6
"""Tensors by each transport. The first is not timed: it forms the process group."""


class Peer(Worker):
    """An end of the transfers."""

    def __init__(self, accelerator: str, nbytes: int) -> None:
        """`accelerator`: name of the accelerator that the CPU takes the place of; "" on a GPU."""
        if accelerator:
            self._mail._tensors = TensorTransfers(
                self._mail._messages,
                backend="gloo",
                accelerator_of=lambda tensor: accelerator if self._on_device(tensor) else "",
            )
        self._nbytes, self._host = nbytes, None

    def _on_device(self, tensor) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor is not self._host

    def send_all(self, group: str) -> tuple[list[float], dict[str, int]]:
        """Return the seconds of each send, and how many tensors took each transport."""
        seconds = []
        for value in range(SENDS):
            tensor = torch.full((self._nbytes,), value, dtype=torch.uint8, device=self.device)
            self.recv(group, 0, timeout=120)  # the receiver is ready
            began = time.perf_counter()
            self.send_tensor(tensor, group, 0, timeout=120)
            seconds.append(time.perf_counter() - began)
        return seconds, dict(self._mail._tensors.sent)

    def broadcast_all(self, groups: list[str], source: str) -> tuple[list[float], bool]:
        """Return the seconds of each broadcast of `source`, and whether all arrived with their values."""
        seconds, right = [], []
        for value in range(SENDS):
            own = value if self.group_name == source else 255
            tensor = torch.full((self._nbytes,), own, dtype=torch.uint8, device=self.device)
            began = time.perf_counter()
            self.broadcast(tensor, groups=groups, src=(source, 0), timeout=120)
            seconds.append(time.perf_counter() - began)
            right.append(bool((tensor == value).all()))
        return seconds, all(right)

    def recv_all(self, group: str, on_device: bool) -> bool:
        """Return whether all tensors arrived with their values."""
        buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device if on_device else "cpu")
        self._host = None if on_device else buffer
        right = []
        for value in range(SENDS):
            buffer.fill_(255)
            receipt = self.recv_tensor(buffer, group, 0, async_op=True, timeout=120)
            self.send("ready", group, 0)
            receipt.wait()
            right.append(bool((buffer == value).all()))
        return all(right)


def tensors(world: World) -> dict:
    """Return GB/s of each transport: CUDA IPC on one GPU, NCCL where there are two, and host memory."""
    nbytes = 1 << (22 if world.small else 30)
    slots = min(2, torch.cuda.device_count()) if world.cuda else 2
    found = {}
    with Cluster.local(**{"gpus" if world.cuda else "processes": slots}) as cluster:
        one = _launch(cluster, "one", 0, "" if world.cuda else "gpu 0", nbytes)
        same = _launch(cluster, "same", 0, "" if world.cuda else "gpu 0", nbytes)
        found["ipc"] = _figures(one, same, nbytes)
        members = [one, same]
        if slots > 1:
            members.append(_launch(cluster, "other", 1, "" if world.cuda else "gpu 1", nbytes))
            found["group"] = _figures(one, members[-1], nbytes)
        found["host"] = _figures(one, same, nbytes, on_device=False)
        found["broadcast"] = _broadcast(members, nbytes)
    tensor = torch.ones(nbytes, dtype=torch.uint8, device=world.device)
    also = torch.empty_like(tensor)
    return found | {"bytes": nbytes, "copy_gb_per_second": rate(nbytes, world.median(lambda: also.copy_(tensor)))}


def _launch(cluster: Cluster, name: str, slot: int, accelerator: str, nbytes: int):
    return Peer.create_group(accelerator, nbytes).launch(cluster, PackedPlacementStrategy(slot, slot), name=name)


def _broadcast(members: list, nbytes: int) -> dict:
    calls = [member.broadcast_all([other.name for other in members], members[0].name) for member in members]
    found = [call.wait(timeout=120)[0] for call in calls]
    return {
        "receivers": len(members) - 1,
        "bit_equal": all(right for _, right in found),
        "gb_per_second": rate(nbytes, statistics.median(found[0][0][1:])),
    }


def _figures(sender, receiver, nbytes: int, *, on_device: bool = True) -> dict:
    receiving, sending = receiver.recv_all(sender.name, on_device), sender.send_all(receiver.name)
    [equal], [(seconds, sent)] = receiving.wait(timeout=120), sending.wait(timeout=120)
    return {
        "sent_so_far": sent,
        "bit_equal": equal,
        "gb_per_second": rate(nbytes, statistics.median(seconds[1:])),
        "first_seconds": round(seconds[0], 4),
    }
