"""The worker class of test_tensors.py: it treats tensors of the CPU as tensors on accelerators, with gloo in the place of NCCL."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import torch

from rl_core import Worker
from rl_core.collective.pair import NotFormed
from rl_core.workers import tensors
from rl_core.workers.tensors import TensorTransfers

DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
SHAPES = ((), (3,), (2, 3, 4), (257, 129))


def sample(dtype: str, shape: tuple[int, ...], *, transposed: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(dtype) + len(shape))
    values = torch.randint(0, 100, shape[::-1] if transposed else shape, generator=generator)
    found = values.to(getattr(torch, dtype))
    return found.permute(*reversed(range(found.dim()))) if transposed else found


def samples() -> list[torch.Tensor]:
    plain = [sample(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    return [
        *plain,
        sample("float32", (2, 3, 4), transposed=True),
        sample("float32", (40, 30))[5:15, ::2],
        torch.complex(sample("float32", (5,)), sample("float32", (5,)) + 1).conj(),
        torch.complex(sample("float32", (5,)), sample("float32", (5,)) + 1).conj().imag,
        torch.empty(0, 4),
    ]


class Courier(Worker):
    """Sends and receives tensors."""

    def __init__(self, device):
        """`device`: name of the accelerator on which all tensors are; "" gives each process its own."""
        self._device = device or self.identity.name
        self._has_written = threading.Event()
        self._mail._tensors = TensorTransfers(
            self._mail._messages,
            backend="gloo",
            accelerator_of=lambda tensor: self._device if isinstance(tensor, torch.Tensor) else "",
        )

    def send_samples(self, group, rank):
        """Send all samples with a message before each; return how many took each transport."""
        for number, tensor in enumerate(samples()):
            self.send(number, group, rank)
            self.send_tensor(tensor, group, rank, timeout=60)
        return dict(self._mail._tensors.sent)

    def recv_samples(self, group, rank):
        """Receive all samples, every second one into a tensor that is not contiguous; return the numbers of those that differ."""
        wrong = []
        for number, expected in enumerate(samples()):
            assert self.recv(group, rank, timeout=60) == number
            buffer = torch.zeros_like(expected, memory_format=torch.contiguous_format)
            if number % 2 and expected.dim() > 1:
                buffer = torch.zeros(expected.shape[::-1], dtype=expected.dtype).permute(
                    *reversed(range(expected.dim()))
                )
            self.recv_tensor(buffer, group, rank, timeout=60)
            if not torch.equal(buffer, expected):
                wrong.append(number)
        return wrong

    def send_one(self, value, group, rank, timeout=60, shape=(4,)):
        self.send_tensor(torch.full(shape, float(value)), group, rank, timeout=timeout)

    def send_many(self, values, group, rank):
        """Send without waiting for each."""
        sends = [self.send_tensor(torch.full((4,), float(value)), group, rank, async_op=True) for value in values]
        for send in sends:
            send.wait(60)

    def recv_one(self, group, rank, timeout=60, size=4):
        """Return the first four elements."""
        buffer = torch.zeros(size)
        self.recv_tensor(buffer, group, rank, timeout=timeout)
        return buffer[:4].tolist()

    def recv_backwards(self, count, group, rank):
        """Start `count` receives and wait for the last one first."""
        buffers = [torch.zeros(4) for _ in range(count)]
        receipts = [self.recv_tensor(buffer, group, rank, async_op=True, timeout=60) for buffer in buffers]
        for receipt in reversed(receipts):
            receipt.wait()
            receipt.wait()
        return [buffer[0].item() for buffer in buffers]

    def recv_plain(self, group, rank):
        return self.recv(group, rank, timeout=60)

    def recv_array(self, group, rank):
        """Receive into a tensor in host memory."""
        self._device, device = "", self._device
        try:
            return self.recv_one(group, rank)
        finally:
            self._device = device

    async def swap(self, group, rank):
        sent = self.send_tensor(torch.full((2**18,), float(self.rank)), group, rank, async_op=True)
        buffer = torch.zeros(2**18)
        await self.recv_tensor(buffer, group, rank, async_op=True, timeout=60).async_wait()
        await sent.async_wait(60)
        return buffer.sum().item()

    def swap_waiting_for_the_send_first(self, group, rank):
        buffer = torch.zeros(4)
        receipt = self.recv_tensor(buffer, group, rank, async_op=True, timeout=60)
        self.send_tensor(torch.full((4,), 2.0), group, rank, async_op=True, timeout=60).wait()
        receipt.wait()
        return buffer.sum().item() if receipt.done() else None

    def spread(self, value, groups, src, size=4, timeout=60):
        """Broadcast into a tensor of `size` elements, or, if that is 0, into host memory.

        Return whether the tensor itself was returned, its first four elements, and how many were sent by each transport.
        """
        is_source = (self.group_name, self.rank) == src
        mine = torch.full((size,), float(value)) if is_source else torch.zeros(size) if size else None
        found = self.broadcast(mine, groups=groups, src=src, timeout=timeout)
        return found is mine, found[:4].tolist(), self.sent()

    def spread_and_swap(self, groups, backwards):
        """Broadcast a tensor from each of `groups` and send one to each, all at once; wait in either order. Return the numbers that arrived."""
        others = [group for group in groups if group != self.group_name]
        number = float(groups.index(self.group_name))
        buffers = {group: [torch.zeros(2**18), torch.zeros(2**18)] for group in others}
        mine = torch.full((2**18,), number)
        handles = []
        for group in groups:
            obj = mine if group == self.group_name else buffers[group][0]
            handles.append(self.broadcast(obj, groups=groups, src=(group, 0), async_op=True, timeout=60))
        handles += [self.send_tensor(mine + 10, group, 0, async_op=True, timeout=60) for group in others]
        handles += [self.recv_tensor(buffers[group][1], group, 0, async_op=True, timeout=60) for group in others]
        for handle in reversed(handles) if backwards else handles:
            handle.wait()
        return {group: [buffer.unique().tolist() for buffer in pair] for group, pair in buffers.items()}

    def recv_after_error(self, group, rank):
        """Receive with an error; return the buffer when the transfer that has failed has written after it."""
        buffer = torch.zeros(4)
        try:
            self.recv_tensor(buffer, group, rank, timeout=60)
        except Exception:
            self._has_written.wait(60)
            return buffer.tolist()

    def send_then_recv(self, group, rank):
        self.send_one(1, group, rank)
        return self.recv_one(group, rank)

    def fail_in_transfer(self, how):
        """Let the next transfer over a group end as `how` says, when this process has formed the group or is about to form it."""
        groups = self._mail._tensors._groups
        form, formed = groups.form, groups.formed

        def fail_to_form(plan, device, *, timeout):
            groups.form, groups.formed = form, formed
            if how == "unformed":
                raise NotFormed("no route to the other end")
            if how == "stuck":
                time.sleep(20)
            if how == "killed in formation":
                os.kill(os.getpid(), signal.SIGKILL)
            group = formed(plan) or form(plan, device, timeout=timeout)
            return SimpleNamespace(broadcast=fail_to_broadcast) if how in ("killed", "error", "late") else group

        def fail_to_broadcast(data, *, timeout):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "late":
                threading.Timer(0.5, write_late, (data,)).start()
            raise RuntimeError("the device is broken")

        def write_late(data):
            data.fill_(99)
            self._has_written.set()

        if how == "stuck":
            tensors.FORM_SECONDS = 2.0
        groups.form, groups.formed = fail_to_form, lambda plan: None

    def group_keys(self):
        """Return the keys of the working groups in which this process sends."""
        pairs = self._mail._tensors._pairs
        groups = [] if pairs is None else pairs._groups.values()
        return [g.plan.key for g in groups if not g.poisoned and g.plan.members[0] == self.identity.name]

    def sent(self):
        return dict(self._mail._tensors.sent)

    def left_over(self, messages=True):
        """Return the threads of transfers and the stored messages of this worker's transfers that do not end within some seconds.

        `messages` false does not wait for messages.
        """
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            threads = [thread.name for thread in threading.enumerate() if "tensor" in thread.name]
            keys = self._mail._messages.backend.control("stats").result(30).keys
            stored = [key for key in keys if len(key) > 2 and self.identity.name in key[:2]]
            if not threads and not (messages and stored):
                break
            time.sleep(0.1)
        return threads, stored
