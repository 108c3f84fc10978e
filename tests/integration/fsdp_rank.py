"""Actor ranks as processes of their own: `run_rank` is the whole life of one.

A scenario is {name, spec, groups: [numbers of rank 0, ...], verbs: [[verb, argument...], ...]}. Each has a fresh actor in the same process
group.
"""

import asyncio
import gc
import importlib
import itertools
import json
import os
import threading
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from rl_core.actors import hf, rendezvous
from rl_core.actors.critic import is_critic_name
from rl_core.actors.device_copies import DeviceCopies
from rl_core.actors.fsdp import compiling
from rl_core.actors.source import GatheredSource, GatheringPlan
from rl_core.api.backends import TRAINERS
from rl_core.api.errors import RLJobError
from rl_core.checkpoint import tensors
from rl_core.messages.weights import ReceiverAddress
from rl_core.plan.groups import EMBODIED_WORKERS
from rl_core.weights.manifest import checksum, wire_dtype
from rl_core.weights.publisher import WeightPublisher
from rl_core.weights.version_source import SourceEntry
from rl_core.workers.context import WorkerContext, stand_alone_identity
from tests.actor_samples import make_record
from tests.integration.memory_meter import measure
from tests.integration.weight_world import hash_of
from tests.trajectory_samples import make_trajectory

compiling.BACKEND = "aot_eager"
"""torch.compile traces and splits the layers as for its default backend, whose C++ code takes a minute to compile."""


class Rank:
    """The verbs of a scenario, and what they saw."""

    def __init__(self, spec: dict, groups: list[list[int]], rank: int, world_size: int) -> None:
        self.spec, self.rank, self.groups = spec, rank, groups[rank]
        self.seen: dict = {"metrics": [], "scores": []}
        context = WorkerContext(replace(stand_alone_identity(), rank=rank, world_size=world_size))
        trainer = EMBODIED_WORKERS["actor"] if "program" in spec else TRAINERS[spec["actor"].get("backend", "fsdp2")]
        module, _, name = trainer.partition(":")
        self.actor = getattr(importlib.import_module(module), name).create_in_context(context, spec)
        self.actor.init_worker()

    def train(self, step: int) -> None:
        """Train on this rank's groups, other ones in each step."""
        if "program" in self.spec:
            self.actor.load_trajectories([make_trajectory(self.groups, step)])
        elif self.actor.ranks.receives:
            self.actor.load_batch([make_record(group + 100 * step) for group in self.groups])
        self.actor.compute_log_probs()
        self.actor.compute_advantages_and_returns()
        self.seen["metrics"].append(self.actor.run_training(step))

    def train_asking(self, step: int) -> None:
        """Train as `train`; note the lengths of the micro-batches, and where megatron asks for values of tensors in a pass."""
        from tests.integration.value_questions import Questions  # loads megatron

        backend, lengths = self.actor.backend, self.seen.setdefault("lengths", [])
        plain = backend._pack
        backend._pack = lambda rows: lengths.append(sum(rows.lengths)) or plain(rows)
        with Questions() as questions:
            self.train(step)
        del backend._pack
        self.seen["asked"] = questions.in_passes

    def cancel(self, step: int, micro_batch: int) -> None:
        """Train as `train`; rank 1 alone is asked to give the step up while it runs that micro-batch."""
        plain, began = self.actor.manager.before_micro_batch, []

        def before(model, is_last):
            began.append(is_last)
            if self.rank == 1 and len(began) == micro_batch + 1:
                asyncio.run(self.actor.cancel_training())
            return plain(model, is_last)

        self.actor.manager.before_micro_batch = before
        self.train(step)
        del self.actor.manager.before_micro_batch
        self.seen["begun"] = len(began)

    def leave(self, step: int, micro_batch: int) -> None:
        """Train as `train`; the step is given up before that micro-batch, counted from 1; 0: before training begins."""
        method = "record_progress" if micro_batch else "compute_advantages_and_returns"
        plain, seen = getattr(self.actor, method), itertools.count(1)

        def then_ask(*arguments):
            answer = plain(*arguments)
            if next(seen) == max(micro_batch, 1):
                asyncio.run(self.actor.cancel_training())
            return answer

        setattr(self.actor, method, then_ask)
        self.train(step)
        delattr(self.actor, method)

    def poison(self) -> None:
        """Make the last rank's losses infinite."""
        plain = self.actor.backend.forward_backward

        def forward_backward(parts, objective, normalizers, *, proceed):
            def infinite(*arguments):
                result = objective(*arguments)
                last = self.rank == self.actor.ranks.size - 1
                return replace(result, loss=result.loss * float("inf")) if last else result

            return plain(parts, infinite, normalizers, proceed=proceed)

        self.actor.backend.forward_backward = forward_backward

    def save(self, path: str, step: int) -> None:
        """Save a checkpoint."""
        self.actor.save_checkpoint(path, step)

    def save_beside(self, path: str, step: int) -> None:
        """Begin to save a checkpoint in the background; it is read from model and optimizer when training is about to change them."""
        background, asked = self.actor.manager._background, threading.Event()
        copy, wait_copied = background._copy_of, background.wait_copied

        def late(part):
            assert asked.wait(300), "training asks before it changes anything"
            return copy(part)

        background._copy_of, background.wait_copied = late, lambda: (asked.set(), wait_copied())
        self.written = self.actor.save_checkpoint(path, step, in_background=True)

    def saved(self) -> None:
        """Wait for the checkpoint that is saved in the background and say which files this rank wrote."""
        self.seen["saved"] = asyncio.run(self.written)

    def load(self, path: str) -> None:
        """Load a checkpoint."""
        self.actor.load_checkpoint(path)

    def export(self, path: str) -> None:
        """Export a Hugging Face folder."""
        self.actor.export_hf(path)

    def score(self) -> None:
        """Score one fixed sequence."""
        self.seen["scores"].append(self.actor.score([1, 2, 3, 4, 5, 6], 3))

    def offload(self) -> None:
        """Take everything away, say how many bytes are left, and bring it back."""
        before = self.resident()
        self.actor.manager.offload_param_and_grad(True)
        self.actor.manager.offload_optimizer()
        self.seen["moment_bytes"] = self.actor.manager.residency.metrics["offload/bytes"]
        self.seen["resident"] = [before, self.resident()]
        self.actor.manager.load_param_and_grad(0, True)
        self.actor.manager.load_optimizer(0)

    def resident(self) -> int:
        """Return the bytes in the storages of weights, moments and gradients, and of what FSDP1 gathers and adds up in."""
        tensors = [*self.actor.manager.weight_tensors(), *self.actor.manager.moment_tensors()]
        modules = list(self.actor.manager.model.modules()) if hasattr(self.actor.manager, "model") else []
        for flat in (module._handle.flat_param for module in modules if getattr(module, "_handle", None) is not None):
            tensors += [flat, *(getattr(flat, name, None) for name in ("_full_param_padded", "_mp_shard", "grad"))]
        tensors += [parameter.grad for module in modules for parameter in module.parameters(recurse=False)]
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
        return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in local}.values())

    def measure(self) -> None:
        """Report what another actor of this rank allocates in each phase, bytes."""
        size = self.actor.ranks.size
        self.seen["measured"] = measure(lambda: Rank(self.spec, [[]] * size, self.rank, size).actor)

    def state(self) -> None:
        """Gather the weights on rank 0; say of each tensor its bits and some values spread over it, and the bits of this rank's critic."""
        held = self.actor.manager.named_slices().items()
        self.seen["critic"] = {
            name: list(checksum(torch.cat([part.tensor for part in parts])))
            for name, parts in held
            if is_critic_name(name)
        }
        whole = self.actor.manager.get_model_state_dict(True, True)
        self.seen["bits"] = {name: list(checksum(tensor)) for name, tensor in whole.items()}
        self.seen["state"] = {
            name: tensor.float().flatten()[:: max(1, tensor.numel() // 61)].tolist() for name, tensor in whole.items()
        }

    def weights(self) -> None:
        """Gather the weights on rank 0 and say which placements the shards have."""
        whole = self.actor.manager.get_model_state_dict(True, True)
        self.seen["weights"] = {name: tensor.float().flatten().tolist() for name, tensor in whole.items()}
        shards = self.actor.manager.get_model_state_dict(False, False)
        self.seen["placements"] = sorted({str(getattr(tensor, "placements", "none")) for tensor in shards.values()})

    def seen_steps(self) -> None:
        """Report the steps with which `set_global_step` of the policy was called."""
        self.seen["steps"] = self.actor.manager.model.told

    def gather(self, shapes: dict[str, list[int]], dtype: str, bucket_bytes: int, publish: bool) -> None:
        """Gather tensors cut over the ranks as a version, and say which of them differ from `full_tensor` in any bit.

        With `publish` false rank 0 takes the first bucket only, as when its publisher fails.
        """
        generator = torch.Generator().manual_seed(5)
        whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        ranks, strategy = self.actor.ranks, self.actor.manager.strategy
        cut = {name: distribute_tensor(tensor, ranks.mesh, [Shard(0)]) for name, tensor in whole.items()}
        cut["whole.buffer"] = torch.arange(5.0)
        slices = {name: strategy.slice_of(tensor) for name, tensor in cut.items()}
        parts = {name: [part] for name, part in slices.items()}
        names = [*((name, None) for name in cut), ("tied", "a")]
        entries = [
            SourceEntry(name, slices[tied or name].shape, wire_dtype(slices[tied or name].tensor, dtype), tied)
            for name, tied in names
        ]
        source = GatheredSource(entries, parts, GatheringPlan(parts, ranks), ranks, bucket_bytes=bucket_bytes)
        given = {}
        for bucket in source.buckets("cpu") if self.rank == 0 else ():
            given |= {source.entries[i].name: t for i, t in zip(bucket.place.entries, bucket.tensors, strict=True)}
            if not publish:
                break
        source.finish()
        whole["whole.buffer"] = cut["whole.buffer"]
        expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in whole.items()}
        self.seen["given"] = list(given)
        self.seen["differ"] = [
            name
            for name, tensor in given.items()
            if (tensor.shape, tensor.dtype) != (expected[name].shape, expected[name].dtype)
            or not torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
        ]
        self.seen["rows"] = {name: slices[name].tensor.shape[0] for name in shapes}

    def publish(self, version: int) -> None:
        """Publish a version; rank 0 says which tensors of it are not those that it gathers otherwise."""
        if self.rank == 0 and self.actor.publisher is None:
            self.actor.publisher = WeightPublisher(self.actor.cfg, 0)
        report = self.actor.sync_model_to_rollout(version, [], 0)
        state = self.actor.manager.get_model_state_dict(True, True)
        self.seen["reported"] = report is not None
        if report is not None:
            wire = getattr(torch, self.actor.cfg.model.dtype)
            entries = self.actor.publisher._pull_server.committed.manifest.entries
            self.seen["differ"] = [one.name for one in entries if one.checksum != checksum(state[one.name].to(wire))]

    def publish_to(self, version: int, receivers: list[dict], dies: tuple[int, str] | None = None) -> None:
        """Publish a version as if each rank had a device of its own, cpu:RANK. Shared memory stands in for its memory.

        `dies`: (a rank, where): it ends in its third "broadcast", or when the version is whole on all devices ("deliver", rank 0).
        """
        weights = self.actor.cfg.weights.model_copy(update={"transport": "ipc", "bucket_bytes": 1 << 13})
        self.actor.cfg = self.actor.cfg.model_copy(update={"weights": weights})
        self.actor._context.device_uuids = (f"cpu:{self.rank}",)
        if self.rank == 0 and self.actor.publisher is None:
            self.actor.publisher = WeightPublisher(self.actor.cfg, 0, device_uuid="cpu:0")
            self.actor.publisher._transport._wanted = "auto"
        if dies == (self.rank, "deliver"):
            self.actor.publisher._transport.deliver = lambda *_: os._exit(9)
        plain, made, filled = DeviceCopies.broadcast, [], []

        def noted(copies, bucket, tensors):
            made.append(copies)
            filled.append(copies._buffer.is_allocated)
            if len(made) == 3 and dies == (self.rank, "broadcast"):
                os._exit(9)
            plain(copies, bucket, tensors)

        DeviceCopies.broadcast = noted
        try:
            addresses = [ReceiverAddress(**one) for one in receivers]
            report = self.actor.sync_model_to_rollout(version, addresses, len(addresses))
        finally:
            DeviceCopies.broadcast = plain
            freed = not any(copies._buffer.is_allocated for copies in made)
            if self.rank == 0:
                freed &= not self.actor.publisher._device_buffer.is_allocated
            seen = {"pid": os.getpid(), "broadcasts": len(made), "filled": any(filled), "freed": freed}
            self.seen.setdefault("published", []).append(seen)
        state = self.actor.manager.get_model_state_dict(True, True)
        if report is not None:
            bits = {name: hash_of(tensor) for name, tensor in state.items() if name != "lm_head.weight"}
            seen |= {"acked": report.acked, "transport": report.transport, "bits": bits}

    def offer(self, needs_base: bool) -> None:
        """Say what is given to the publisher, by name: shape, type and bits."""
        source, offered = self.actor.manager.publish_source(1 << 12, needs_base=needs_base), {}
        for bucket in source.buckets("cpu") if self.rank == 0 else ():
            for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
                what = [list(tensor.shape), str(tensor.dtype), list(checksum(tensor))]
                offered[source.entries[index].name] = what
        source.finish()
        self.seen.setdefault("offered", []).append(offered)

    def copies(self) -> None:
        """Say the bits of the adapters of which each tensor-parallel rank has a whole one."""
        parts = self.actor.manager.master_slices().items()
        self.seen["copies"] = {name: list(checksum(one.tensor)) for name, (one, *_) in parts if one.replicated}

    def die(self, rank: int) -> None:
        """End this process at once if it is `rank`."""
        if self.rank == rank:
            os._exit(9)


def run_scenario(scenario: dict, rank: int, world_size: int) -> dict:
    """Run the verbs of one scenario on this rank; return what it saw.

    `slow_disk` of the scenario: (a rank, by how many seconds later than the others it opens the first file of a model and of a checkpoint).
    """
    slow, seconds = scenario.get("slow_disk", (None, 0))
    if slow is not None:  # the process group still has the limit of the scenario before
        rendezvous.limit_collectives(scenario["spec"]["runtime"]["deadlines"]["collective"])
    for module in (hf, tensors) if rank == slow else ():
        opened = module.safe_open
        late = [seconds]
        module.safe_open = lambda *args, opened=opened, late=late, **kwargs: (
            time.sleep(late.pop() if late else 0),
            opened(*args, **kwargs),
        )[1]
    actor = Rank(scenario["spec"], scenario["groups"], rank, world_size)
    try:
        for verb, *arguments in scenario["verbs"]:
            getattr(actor, verb)(*arguments)
    except RLJobError as error:
        actor.seen["error"] = f"{type(error).__name__}: {error}"
    actor.seen["counts"] = asdict(actor.actor.manager.counts)
    return actor.seen


def run_rank(rank: int, world_size: int, port: str, out: Path, scenarios: list[dict]) -> None:
    """Run the scenarios as a rank that meets the others at `port`; what it saw goes to `out` as JSON after each. Ends the process."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    seen: dict = {}
    try:
        for scenario in scenarios:
            seen[scenario["name"]] = run_scenario(scenario, rank, world_size)
            out.write_text(json.dumps(seen))
            gc.collect()  # the process groups of the actor, whose threads poll
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # A lost peer leaves gloo's threads in a state whose tear-down may wait; what counts is on disk.
    os._exit(0)
