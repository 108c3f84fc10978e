"""Ways to serve wrong weights, done to a real publisher while versions differ by one step of 1e-6 only: the smallest errors that a run can make."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_core.api.errors import DeadlineExceeded, GenerationUnavailable, InfrastructureError
from rl_core.weights.manifest import host_bytes
from tests.integration.rollout_world import random_state

PROMPT = list(range(2, 34))
EMBEDDING = "model.embed_tokens.weight"
KEY, VALUE, DOWN = (
    f"model.layers.1.{name}.weight" for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
)
LEARNING_RATE = 1e-6


def moved(masters, by=LEARNING_RATE):
    """Return float32 weights after an optimizer step that moves each of them by `by`. In bfloat16 most of them stay as they are."""
    return {name: tensor + by for name, tensor in masters.items()}


def cast(world, masters):
    """Return what the trainer sends of its float32 weights."""
    return {name: tensor.to(getattr(torch, world.spec.model.dtype)) for name, tensor in masters.items()}


def a_skipped_bucket(place, before, name=DOWN):
    place[name][:] = host_bytes(before[name])


def uninitialised_memory(place, before):
    place[DOWN][:] = np.random.default_rng(1).integers(0, 255, place[DOWN].size, np.uint8)


def two_tensors_swapped(place, before):
    key = place[KEY].copy()
    place[KEY][:], place[VALUE][:] = place[VALUE], key


def a_shard_of_another_rank(place, before):
    half = place[DOWN].size // 2
    place[DOWN][:half] = place[DOWN][half:]


def a_cast_too_many(place, before):
    dtype = before[DOWN].dtype
    tensor = torch.from_numpy(place[DOWN]).view(dtype)
    tensor.copy_(tensor.to(torch.bfloat16 if dtype == torch.float32 else torch.float8_e4m3fn))


def half_an_update(place, before):
    for name in sorted(place)[len(place) // 2 :]:
        a_skipped_bucket(place, before, name)


def a_tied_weight_not_updated(place, before):
    a_skipped_bucket(place, before, EMBEDDING)


WAYS = (
    a_skipped_bucket,
    uninitialised_memory,
    two_tensors_swapped,
    a_shard_of_another_rank,
    a_cast_too_many,
    half_an_update,
    a_tied_weight_not_updated,
)


def assert_not_served(world, way):
    """Publish a version, and wrongly the one that is a step of 1e-6 later: it is refused and nothing is served until it comes as it is."""
    masters = random_state(1)
    before, after = cast(world, masters), cast(world, moved(masters))
    world.publish_next(before)
    encoder = world.publisher._patch_encoder or world.publisher._copies
    write = encoder.write

    def write_wrongly(*args, **kwargs):
        copy = replace(write(*args, **kwargs), patch=None)
        right = copy.memory.data.copy()
        starts = {copy.manifest.entries[index]: start for index, start in copy.layout.starts.items()}
        way({entry.name: copy.memory.data[start : start + entry.nbytes] for entry, start in starts.items()}, before)
        assert not np.array_equal(right, copy.memory.data), "this way makes no error here"
        return copy

    encoder.write = write_wrongly
    try:
        with pytest.raises(DeadlineExceeded, match="verification failed|hold something else"):
            world.publish_next(after)
    finally:
        encoder.write = write
    assert world.worker.status()["version"] == -1
    with pytest.raises(GenerationUnavailable, match="no proven weights are served"):
        world.on_loop(world.worker.probe(PROMPT, 4))
    assert world.publish_next(after).acked == ("rollout:0",) and world.worker.status()["version"] == world.version


def assert_a_tensor_that_is_not_loaded_is_named(world):
    """Load a version that is a step of 1e-6 later into an SGLang engine, without one tensor."""
    masters = random_state(12)
    world.publish_next(cast(world, masters))
    given = [(name, tensor) for name, tensor in cast(world, moved(masters)).items() if name != DOWN]
    with pytest.raises(InfrastructureError, match=DOWN):
        world.engine.weight_target.load(iter(given), 99)
    world.publish_next(cast(world, masters))
    assert world.worker.status()["version"] == world.version
