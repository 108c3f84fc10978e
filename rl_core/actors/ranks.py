"""The ranks of an actor: how model and batch are divided over them, small collectives, and errors that name the lost ranks.

A replica here is a set of ranks that together hold one whole model (tensor, context and pipeline parallelism) and train the same rows. Data
ranks are the replicas by number. With a single rank every method is local. Nothing is pickled: numbers travel as tensors, structures as
JSON.
"""

import itertools
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_core.actors import rendezvous
from rl_core.api.errors import InfrastructureError

ROLL_CALL_SECONDS = 3.0
"""Seconds that the other ranks have to report that they are alive after a collective has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """How many ways the batch (data) and the model (tensor, pipeline, context) are divided. The number of ranks is their product.

    Ranks are numbered with tensor fastest, then context, data and pipeline, as in Megatron.
    """

    data: int
    """Number of data-parallel ranks: they train different rows."""
    tensor: int = 1
    """Number of tensor-parallel ranks: each layer is divided over them."""
    pipeline: int = 1
    """Number of pipeline stages: the layers are divided over them, and only the last one computes a loss."""
    context: int = 1
    """Number of context-parallel ranks: each row is divided over them."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of `rank`."""
        return rank // (self.tensor * self.context) % self.data

    def receives(self, rank: int) -> bool:
        """Return whether `rank` receives the prompt groups of its replica: it is the replica's first rank."""
        return rank == self.data_rank(rank) * self.tensor * self.context

    def data_groups(self) -> list[list[int]]:
        """Return the data-parallel groups: lists of ranks that hold the same part of the model and train different rows.

        Each list is ordered by data rank.
        """
        inner = self.tensor * self.context
        return [
            [(stage * self.data + data_rank) * inner + inner_rank for data_rank in range(self.data)]
            for stage in range(self.pipeline)
            for inner_rank in range(inner)
        ]

    def replicas(self) -> list[list[int]]:
        """Return the replicas: lists of ranks that train the same rows, ordered by data rank.

        The first rank of each list receives prompt groups.
        """
        return [
            [rank for rank in range(self.world) if self.data_rank(rank) == data_rank] for data_rank in range(self.data)
        ]


class Ranks:
    """One rank of an actor, and its collectives over all ranks, over data ranks and over its replica."""

    def __init__(self, sizes: ParallelSizes, *, rank: int, device: torch.device, timeout: float = 60.0) -> None:
        """Join the process group, which is created from MASTER_ADDR and MASTER_PORT unless it exists. A single rank has none.

        `timeout` is the number of seconds until a collective that some rank does not join fails. Raises ValueError for a rank outside [0,
        world size) and InfrastructureError when the ranks do not find each other.
        """
        if not 0 <= rank < sizes.world:
            raise ValueError(f"rank must be in [0, world_size = {sizes.world}), got {rank}; check RANK and WORLD_SIZE")
        self.sizes = sizes
        self.size = sizes.world
        self.rank = rank
        self.device = device
        self._timeout = timeout
        """Seconds until a collective fails, at present; see `collectives_within`."""
        self._failures = 0
        self._hybrid: dict[int, DeviceMesh] = {}
        self._rendezvous = rendezvous.join(self.size, rank, device, timeout) if self.size > 1 else None
        if self._rendezvous is not None and device.type == "cuda":
            # All ranks must take part in the first call of NCCL. Without this one it might be a send, in which few ranks do.
            dist.all_reduce(torch.zeros(1, device=device))
        self._data_group = self._make_group(sizes.data_groups())
        """Process group of the data ranks with the same part of the model. None when it contains all ranks, or only this one."""
        self._replica = self._make_group(sizes.replicas())
        """Process group of this replica. None when it contains all ranks, or only this one."""

    def _make_group(self, partition: Sequence[Sequence[int]]) -> Any:
        """Return this rank's process group in a `partition` of the ranks; None if the group is all ranks, or this one alone."""
        if self._rendezvous is None or len(partition) in (1, self.size):
            return None
        groups = [(members, self._rendezvous.group(members)) for members in partition]
        return next(group for members, group in groups if self.rank in members)

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.sizes.data

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this rank."""
        return self.sizes.data_rank(self.rank)

    @property
    def receives(self) -> bool:
        """Whether this rank receives the prompt groups that the runner admitted for its replica."""
        return self.sizes.receives(self.rank)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Device mesh of all ranks in one dimension, `dp`. A single rank creates a process group for it, on loopback."""
        if self.size == 1:
            rendezvous.join(1, 0, self.device, self._timeout)
        return DeviceMesh(self.device.type, list(range(self.size)), mesh_dim_names=("dp",))

    def hybrid_mesh(self, copies: int) -> DeviceMesh:
        """Return the device mesh [`replicate`, `dp`] for hybrid sharding with `copies` copies of the model.

        It is created at the first call, which is collective. Raises ValueError when there is one rank.
        """
        if copies not in self._hybrid:
            with self.making_groups():
                rows = torch.arange(self.size).view(copies, -1)
                self._hybrid[copies] = DeviceMesh(self.device.type, rows, mesh_dim_names=("replicate", "dp"))
        return self._hybrid[copies]

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        """Have process groups that a library creates inside the block listen on the network of the ranks.

        A single rank first creates a process group of its own, on loopback.
        """
        joined = self._rendezvous or rendezvous.join(1, 0, self.device, self._timeout)
        with joined.listening():
            yield

    @contextmanager
    def collectives_within(self, seconds: float) -> Iterator[None]:
        """Let collectives inside the block fail after `seconds`, also in process groups that are created inside it.

        For work in which ranks read or write files between collectives: the slowest disk may be minutes behind the others.
        """
        previous, self._timeout = self._timeout, seconds
        rendezvous.limit_collectives(seconds)
        try:
            yield
        finally:
            self._timeout = previous
            rendezvous.limit_collectives(previous)

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Raise an InfrastructureError that names the lost ranks when a collective inside the block fails.

        `doing` names the activity in the message.
        """
        try:
            yield
        except (dist.DistError, ConnectionError) as error:
            raise self._lost(doing, error) from error
        except RuntimeError as error:
            if not _of_collective(error):
                raise
            raise self._lost(doing, error) from error

    # Among all ranks ------------------------------------------------------------------------------------------------

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum of `number` over all ranks. Collective."""
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all ranks, with its dtype and device. Collective."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def gather(self, structure: Any) -> list[Any]:
        """Return the `structure` of every rank, ordered by rank. It must be representable in JSON. Collective."""
        return [structure] if self.size == 1 else _gather(structure, self.size, None)

    def barrier(self) -> None:
        """Wait until all ranks have called this. Collective."""
        self.all_reduce_max(0)

    # Among the ranks that hold the same part of the model, and other rows than each other -----------------------------

    def sum_over_data_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the data ranks, with its dtype and device. Collective over the data-parallel group."""
        if self.data_size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._data_group)
        return total

    def gather_over_data_ranks(self, structure: Any) -> list[Any]:
        """Return the `structure` of every data rank, ordered by data rank. It must be representable in JSON."""
        return [structure] if self.data_size == 1 else _gather(structure, self.data_size, self._data_group)

    def exchange_over_data_ranks(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Exchange the rows of a CPU tensor between data ranks (all-to-all).

        The first counts[0] rows go to data rank 0, the next counts[1] to data rank 1, and so on. Returns the rows that arrive, ordered by
        sender.
        """
        if self.data_size == 1:
            return rows
        send_counts = torch.tensor(counts, dtype=torch.int64)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=self._data_group)
        received = rows.new_empty(int(receive_counts.sum()), *rows.shape[1:])
        dist.all_to_all_single(
            received, rows.contiguous(), receive_counts.tolist(), send_counts.tolist(), group=self._data_group
        )
        return received

    # Among the ranks that train the same rows -----------------------------------------------------------------------

    @property
    def replica_size(self) -> int:
        """Number of ranks that train the same rows."""
        return self.size // self.data_size

    def broadcast_in_replica(self, data: bytes | None) -> bytes | None:
        """Broadcast `data` from the receiving rank of the replica to its other ranks; return it on all of them.

        The argument of the other ranks is ignored. None is broadcast as None.
        """
        if self.replica_size == 1:
            return data
        source_rank = self.sizes.replicas()[self.data_rank][0]
        size = torch.tensor(-1 if data is None else len(data), dtype=torch.int64)
        dist.broadcast(size, source_rank, group=self._replica)
        if size <= 0:
            return None if size < 0 else b""
        payload = data if self.receives and data is not None else bytes(int(size))
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(content, source_rank, group=self._replica)
        return bytes(content.numpy())

    # A rank that is gone ----------------------------------------------------------------------------------------------

    def _lost(self, doing: str, error: Exception) -> InfrastructureError:
        missing = self._roll_call()
        lost_ranks = (
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            if missing
            else "unknown (all answer)"
        )
        return InfrastructureError(
            f"{doing} failed on actor rank {self.rank} of {self.size}, missing: {lost_ranks}: {str(error).splitlines()[0]};"
            " the actor gang restarts from its newest checkpoint"
        )

    def _roll_call(self) -> list[int]:
        """Return the ranks that do not show up within `ROLL_CALL_SECONDS`; rank 0 when its store is gone."""
        if self._rendezvous is None:
            return []
        store = self._rendezvous.store
        self._failures += 1
        keys = [f"rljob/alive/{self._failures}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        try:
            store.set(keys[self.rank], "1")
            while (
                missing := [r for r, key in enumerate(keys) if not store.check([key])]
            ) and time.monotonic() < deadline:
                time.sleep(0.1)
        except (dist.DistError, RuntimeError):
            return [0]
        return missing


def _gather(structure: Any, size: int, group: Any) -> list[Any]:
    data = torch.frombuffer(bytearray(json.dumps(structure).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    longest = max(int(length) for length in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(buffers, padded, group=group)
    return [json.loads(buffer[: int(length)].numpy().tobytes()) for buffer, length in zip(buffers, sizes, strict=True)]


def _of_collective(error: RuntimeError) -> bool:
    """Return whether a plain RuntimeError comes from a collective: gloo has no type of its own for a lost peer.

    It does when torch.distributed is among the innermost frames, those of torch that ran when it was raised.
    """
    if type(error) is not RuntimeError:
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = itertools.takewhile(lambda name: name.partition(".")[0] == "torch", reversed(modules))
    return any(name.startswith("torch.distributed.") for name in innermost)
