"""The data-parallel ranks of an actor: process group, small collectives, and errors that name who is missing.

One rank needs no other: every method is then local and free. Nothing is pickled: numbers travel as tensors, structures as JSON.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_core.api.errors import ConfigError, InfrastructureError

logger = logging.getLogger(__name__)

ROLL_CALL_SECONDS = 3.0
"""After a failed collective, how long the others have to show that they are alive."""

_meetings: dict[int, dist.Store] = {}
"""Store of the process group made here, by its world size; a process has one group in its life."""


class Ranks:
    """The ranks that train one model; every method that talks is collective."""

    def __init__(self, *, size: int, rank: int, device: torch.device, timeout: float = 60.0) -> None:
        """Join the process group of `size` ranks (made from MASTER_ADDR and MASTER_PORT unless one exists).

        `timeout`: seconds until a collective that some rank does not join fails.
        Raises ValueError for a rank outside [0, size), InfrastructureError when the ranks do not find each other.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, world_size = {size}), got {rank}; check RANK and WORLD_SIZE")
        self.size = size
        self.rank = rank
        self.device = device
        self._timeout = timeout
        self._failures = 0
        self._store = _join(size, rank, device, timeout)
        self.mesh: DeviceMesh = DeviceMesh(device.type, list(range(size)), mesh_dim_names=("dp",))

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turn a failed collective inside the block into an InfrastructureError that names the missing ranks."""
        try:
            yield
        except (dist.DistError, ConnectionError) as error:
            raise self._lost(doing, error) from error
        except RuntimeError as error:
            if not _of_collective(error):
                raise
            raise self._lost(doing, error) from error

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over ranks, in its own type and place."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def largest(self, number: int) -> int:
        """Return the largest `number` over ranks."""
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def gather(self, structure: Any) -> list[Any]:
        """Return every rank's JSON-able `structure`, by rank."""
        if self.size == 1:
            return [structure]
        data = torch.frombuffer(bytearray(json.dumps(structure).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Send the first counts[0] rows of a CPU tensor to rank 0, the next to rank 1, ...; return what arrives, by sender."""
        if self.size == 1:
            return rows
        given = torch.tensor(counts, dtype=torch.int64)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given)
        arrived = rows.new_empty(int(taken.sum()), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), taken.tolist(), given.tolist())
        return arrived

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.largest(0)

    def _lost(self, doing: str, error: Exception) -> InfrastructureError:
        missing = self._roll_call()
        told = (
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            if missing
            else "unknown (all answer)"
        )
        return InfrastructureError(
            f"{doing} failed on actor rank {self.rank} of {self.size}, missing: {told}: {str(error).splitlines()[0]};"
            " the actor gang restarts from its newest checkpoint"
        )

    def _roll_call(self) -> list[int]:
        """Return the ranks that do not show up within `ROLL_CALL_SECONDS`; rank 0 when its store is gone."""
        if self._store is None:
            return []
        self._failures += 1
        keys = [f"rljob/alive/{self._failures}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        try:
            self._store.set(keys[self.rank], "1")
            while (
                missing := [r for r, key in enumerate(keys) if not self._store.check([key])]
            ) and time.monotonic() < deadline:
                time.sleep(0.1)
        except (dist.DistError, RuntimeError):
            return [0]
        return missing


def _join(size: int, rank: int, device: torch.device, timeout: float) -> dist.Store | None:
    """Return the store the ranks meet at; None when somebody else made the process group."""
    limit = timedelta(seconds=timeout)
    if dist.is_initialized():
        if (dist.get_world_size(), dist.get_rank()) != (size, rank):
            raise ConfigError(
                f"the process group has rank {dist.get_rank()} of {dist.get_world_size()}, the actor was given {rank} of {size}"
            )
        return _meetings.get(size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if size == 1 else _rendezvous(size, rank, limit)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise InfrastructureError(f"actor rank {rank} of {size} could not join the process group: {error}") from error
    _meetings[size] = store
    return store


def _rendezvous(size: int, rank: int, limit: timedelta) -> dist.Store:
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT must be set for {size} actor ranks: {error}; start through the launcher"
        ) from error
    try:
        store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
        store.set(f"rljob/joined/{rank}", "1")
        return _all_joined(store, size, rank, limit)
    except (dist.DistError, RuntimeError) as error:
        raise InfrastructureError(
            f"actor rank {rank} of {size} did not reach rank 0 at {host}:{port}: {error}"
        ) from error


def _all_joined(store: dist.Store, size: int, rank: int, limit: timedelta) -> dist.Store:
    keys = [f"rljob/joined/{other}" for other in range(size)]
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise InfrastructureError(
            f"actor rank {rank} of {size} waited {limit.total_seconds():.0f} s for ranks {', '.join(map(str, missing))}; they did not start"
        ) from error
    return store


def _of_collective(error: RuntimeError) -> bool:
    """Return whether a plain RuntimeError comes from gloo or NCCL, which raise no type of their own for a lost peer."""
    text = str(error)
    return any(
        word in text
        for word in (
            "gloo",
            "Connection closed by peer",
            "Connection reset by peer",
            "NCCL",
            "ProcessGroup",
            "Broken pipe",
            "Timed out waiting",
        )
    )
