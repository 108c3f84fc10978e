"""Measures what a training process allocates on its device in each phase: torch reports every allocation of its CPU allocator."""

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from rl_core.actors import reference
from rl_core.weights import offload
from tests.actor_samples import make_record

LENGTH, PROMPT, VOCABULARY = 128, 8, 2000
GROUPS = (0, 1, 2, 4)


class Meter:
    """Bytes that torch's CPU allocator has given out since the meter was made, as far as it is run under it.

    Without the copy that gloo makes of what it reduces and scatters: NCCL makes none. The profiler does not see that gloo's thread frees a
    block. Such a block counts until its address is given out again, or until `forget_unused`.
    """

    def __init__(self) -> None:
        self.held = 0
        self._sizes: dict[int, int] = {}
        """Sizes of the blocks that are held, by address."""

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most that was held while `run` ran."""
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
            gc.collect()
        held = list(itertools.accumulate(self._changes(seen), initial=self.held))
        self.held = held[-1]
        return max(held)

    def forget_unused(self) -> None:
        """Count only the blocks that a tensor of a Python object, or the gradient of one, uses. Not to be called while a graph is held."""
        # isinstance would run foreign code.
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        tensors += [one.grad for one in tensors if isinstance(one, torch.nn.Parameter) and one.grad is not None]
        used = {one.untyped_storage().data_ptr() for one in tensors if not isinstance(one, DTensor)}
        self._sizes = {address: size for address, size in self._sizes.items() if address in used}
        self.held = sum(self._sizes.values())

    def _changes(self, seen: profile) -> Iterator[int]:
        """Yield the size of each block that was allocated, and minus that of each that was freed, in the order of time."""
        events, found = [(event, False) for event in seen.profiler.kineto_results.experimental_event_tree()], []
        while events:
            event, of_gloo = events.pop()
            of_gloo |= event.name.startswith("c10d::") and "reduce_scatter" in event.name
            events += [(child, of_gloo) for child in event.children]
            if event.tag == _EventType.Allocation:
                found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, of_gloo))
        for _, size, address, of_gloo in sorted(found, key=lambda one: one[0]):
            yield -self._sizes.pop(address, 0)
            if size > 0 and not of_gloo:
                self._sizes[address] = size
                yield size


def full_record(group: int):
    """Return a group of four rows of LENGTH tokens each."""
    rng, record = np.random.default_rng(group), make_record(group)
    prompt = [{"role": "user", "content": "", "token_ids": torch.tensor(rng.integers(0, VOCABULARY, PROMPT))}]
    completions = []
    for completion in record.completions:
        answer = {
            "role": "assistant",
            "content": "",
            "token_ids": torch.tensor(rng.integers(0, VOCABULARY, LENGTH - PROMPT)),
            "generation_logprobs": torch.tensor(rng.normal(-3, 0.2, LENGTH - PROMPT), dtype=torch.float32),
        }
        completions.append(replace(completion, message_log=[*prompt, answer], reward=float(rng.integers(0, 3))))
    return replace(record, prompt=prompt, completions=completions)


def train(actor) -> None:
    """Run a training step, on this rank's share of the groups."""
    if actor.ranks.receives:
        share = GROUPS[actor.ranks.data_rank :: actor.ranks.data_size]
        actor.load_batch([full_record(group) for group in share])
    actor.compute_log_probs()
    actor.compute_advantages_and_returns()
    actor.run_training(1)


def score_reference(actor, row: list[int]) -> None:
    """Score `row` with the weights of the reference policy."""
    with actor.manager.reference():
        actor.score(row, 1)


def measure(make_actor: Callable[[], object]) -> dict[str, int]:
    """Return the most that the actor of `make_actor` holds in the phases idle, logprob and train, bytes; train has the optimizer step.

    What is offloaded, or kept of a reference policy, goes to memory that is not torch's, as it would not be in the memory of a device. With a
    reference policy its pass is in logprob too.
    """
    meter, actors = Meter(), []
    offload.torch = reference.torch = _HostMemory()
    try:
        meter.peak(lambda: actors.append(make_actor()))
        (actor,) = actors
        row, parts = (
            list(range(1, LENGTH + 1)) * (actor.cfg.actor.micro_batch_tokens // LENGTH),
            actor.cfg.actor.offload,
        )
        meter.peak(lambda: actor.occupy(["weights", "gradients", *(["optimizer"] if not parts.optimizer else [])]))
        scoring = meter.peak(lambda: actor.score(row, 1))
        if actor.cfg.algorithm.needs_reference:
            scoring = max(scoring, meter.peak(lambda: score_reference(actor, row)))
        measured = {"logprob": scoring, "train": meter.peak(lambda: train(actor))}
        stays = {"weights": not parts.params, "gradients": not parts.grads, "optimizer": not parts.optimizer}
        meter.peak(lambda: actor.occupy([part for part, here in stays.items() if here]))
        meter.forget_unused()
    finally:
        offload.torch = reference.torch = torch
    return measured | {"idle": meter.held}


class _HostMemory(SimpleNamespace):
    """The module torch, but for the memory that tensors are offloaded to."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def empty_like(source, *, dtype=None, **_):
        """Return a tensor of the shape of `source`, which has one dimension."""
        dtype = dtype or source.dtype
        return torch.from_numpy(np.empty(source.numel() * dtype.itemsize, np.uint8)).view(dtype)
