"""The ways to serve wrong weights, each done to a real publisher, receiver and engine: none of them gets a token into training.

What proves what: checksums of the manifest prove what reached the engine's memory; an engine in another process tells the checksums of its
own tensors; the content check has the trainer score what the engine draws, and so sees whatever it computes with. One way is left out
here, an old copy in a CUDA graph, which needs a GPU.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_core.api.errors import DeadlineExceeded, GenerationUnavailable, InfrastructureError, WeightsDiverged
from rl_core.messages.weights import ReceiverRefusal
from rl_core.weights.manifest import host_bytes
from tests.integration import rollout_world
from tests.integration.rollout_world import World, put_behind_the_proof, random_state, transformers_model, wait_for

PROMPT = list(range(2, 34))
EMBEDDING = "model.embed_tokens.weight"
KEY, VALUE, DOWN = (
    f"model.layers.1.{name}.weight" for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
)
AWAKE = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def hf_world():
    made = World(max_seq_len=64, spec={"weights": {"syncer": "patch", "verifyEvery": 3}})
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def hf_bfloat16_world():
    spec = {"model": {"path": "unused", "dtype": "bfloat16"}, "weights": {"syncer": "patch", "verifyEvery": 3}}
    made = World(max_seq_len=64, spec=spec)
    made.start()
    yield made
    made.close()


@pytest.fixture(params=["hf", "sglang"])
def world(request, monkeypatch):
    made = request.getfixturevalue(f"{request.param}_world")
    if request.param == "sglang":  # on the publisher's host its processes read whole versions
        monkeypatch.setattr(made, "host_token", "elsewhere")
    return made


def content_check(world, state):
    """Return how many engines score a prompt like the trainer, which has `state`: 1. Raises WeightsDiverged."""
    return rollout_world.content_check({"rollout:0": world}, transformers_model(state), PROMPT)


def serves(world, state):
    """Return whether `state` is served, by the receiver's word and by what the engine makes of it."""
    return world.worker.status()["version"] == world.version and content_check(world, state) == 1


def start_from(world, seed):
    state = random_state(seed)
    world.publish_next(state)
    assert serves(world, state)
    return state


def stepped(state, step):
    """Return `state` after a small step: few elements of few tensors differ."""
    moved = {name: tensor.clone() for name, tensor in state.items()}
    for name in (EMBEDDING, KEY, DOWN):
        moved[name].view(-1)[step % 7 :: 97] += 0.01
    return moved


# --- on the way -----------------------------------------------------------------------------------------------------------


def old_bytes(place, before, name):
    place[name][:] = host_bytes(before[name])


def noise(place, before, name):
    place[name][:] = np.random.default_rng(1).integers(0, 255, place[name].size, np.uint8)


def swapped(place, before, name):
    key = place[KEY].copy()
    place[KEY][:], place[VALUE][:] = place[VALUE], key


def other_half(place, before, name):
    half = place[name].size // 2
    place[name][:half] = place[name][half:]


def rounded(place, before, name):
    tensor = torch.from_numpy(place[name]).view(torch.float32)
    tensor.copy_(tensor.to(torch.bfloat16))


def half_of_all(place, before, name):
    for late in sorted(place)[len(place) // 2 :]:
        old_bytes(place, before, late)


WAYS = {
    "a skipped bucket": old_bytes,
    "uninitialised memory": noise,
    "two tensors swapped": swapped,
    "a shard of another rank": other_half,
    "a cast too many": rounded,
    "half an update": half_of_all,
    "a tied weight not updated": functools.partial(old_bytes, name=EMBEDDING),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrong_when_it_reaches_the_engine_is_not_served(world, way, monkeypatch):
    before, after = start_from(world, 1), random_state(2)
    write = world.publisher._patch_encoder.write

    def write_wrongly(*args, **kwargs):
        copy = replace(write(*args, **kwargs), patch=None)
        starts = {copy.manifest.entries[index]: start for index, start in copy.layout.starts.items()}
        place = {entry.name: copy.memory.data[start : start + entry.nbytes] for entry, start in starts.items()}
        WAYS[way](place, before, **({} if isinstance(WAYS[way], functools.partial) else {"name": DOWN}))
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(world.publisher._patch_encoder, "write", write_wrongly)
        with pytest.raises(DeadlineExceeded, match="verification failed"):
            world.publish_next(after)
    assert world.worker.status()["version"] == -1
    with pytest.raises(GenerationUnavailable, match="no proven weights are served"):
        world.on_loop(world.worker.probe(PROMPT, 4))
    world.publish_next(after)
    assert serves(world, after)


def test_a_patch_that_is_applied_twice_is_followed_by_the_whole_version(world, monkeypatch):
    states = [start_from(world, 3)]
    states.append(stepped(states[-1], 1))
    copies, write = [], world.publisher._patch_encoder.write

    def keep(*args, **kwargs):
        copies.append(write(*args, **kwargs))
        first = copies[0].patch
        again = replace(copies[-1].patch, tensors=first.tensors, memory=first.memory, nbytes=first.nbytes)
        return copies[-1] if len(copies) == 1 else replace(copies[-1], patch=again)

    with monkeypatch.context() as patch:
        patch.setattr(world.publisher._patch_encoder, "write", keep)
        patch.setattr(world.publisher._copies, "free", lambda memory: None)  # the first patch is needed again
        assert world.publish_next(states[-1]).patched == ("rollout:0",)
        states.append(stepped(states[-1], 2))
        assert world.publish_next(states[-1]).patched == ()
    assert serves(world, states[-1])


def test_a_worker_keeps_a_model_for_patches_only_where_its_engine_cannot_read_the_publishers_memory(
    sglang_world, monkeypatch
):
    receiver, state = sglang_world.worker._built().receiver, random_state(20)
    size = sum(tensor.nbytes for name, tensor in state.items())
    held, patched, buffer = [], [], sglang_world.engine.weight_target._buffer.bytes
    for step, host in enumerate([sglang_world.host_token, "elsewhere", "elsewhere", sglang_world.host_token]):
        monkeypatch.setattr(sglang_world, "host_token", host)
        buffer.zero_()
        patched.append(bool(sglang_world.publish_next(state).patched))
        held.append(sum(kept.nbytes for kept in (receiver._states.retained or {}).values()))
        assert bool(buffer.any()) is (host == "elsewhere"), "through the worker or not"
        assert serves(sglang_world, state)
        state = stepped(state, step)
    assert held == [0, size, size, 0] and patched == [False, False, True, False]


# --- told, but not done -----------------------------------------------------------------------------------------------------


def test_success_that_is_told_without_a_transfer_is_refused(world):
    state = start_from(world, 4)
    answer = world.on_loop(world.worker.weights_commit(world.version + 1, "0123"))
    assert isinstance(answer, ReceiverRefusal) and "is not applied here" in answer.reason
    assert serves(world, state)


def test_groups_of_another_version_than_is_served_are_given_back(world):
    start_from(world, 5)
    wait_for(lambda: world.ledger.polls)
    (call, *_), given = world.ledger.polls.pop(), len(world.ledger.given_back)
    call.reply([world.lease(70 + given, version=world.version + 1)])
    wait_for(lambda: len(world.ledger.given_back) > given)
    assert world.ledger.given_back[-1][1:] == ("stale", "its weights are not those that are served")


# --- in the engine ----------------------------------------------------------------------------------------------------------


def test_an_engine_that_computes_with_another_tensor_than_it_was_given_is_seen_by_the_content_check(world):
    before, after = start_from(world, 6), random_state(7)
    world.publish_next(after)
    put_behind_the_proof(world, EMBEDDING, before[EMBEDDING])
    with pytest.raises(WeightsDiverged, match="rollout:0 must score a fixed prompt like the trainer"):
        content_check(world, after)
    assert serves(world, start_from(world, 8))


def test_keys_and_values_of_older_weights_that_serve_a_new_row_are_seen_by_the_content_check(sglang_world):
    world = sglang_world
    start_from(world, 9)  # the prompt is in the engine's prefix cache, in the part of this version
    world.on_loop(world.worker.pause_generation("in_place"))  # an update that finds rows in place keeps the caches
    after, target = random_state(10), world.engine.weight_target
    target.load(iter(after.items()), world.version)
    world.on_loop(target.resume(world.version, ""))
    world.on_loop(world.worker.continue_generation())
    with pytest.raises(WeightsDiverged):
        content_check(world, after)
    assert serves(world, start_from(world, 11))


def test_a_tensor_that_does_not_reach_an_engine_in_another_process_is_seen_by_its_own_checksums(sglang_world):
    start_from(sglang_world, 12)
    with pytest.raises(InfrastructureError, match=DOWN):
        sglang_world.engine.weight_target.load(((n, t) for n, t in random_state(13).items() if n != DOWN), 99)
    assert serves(sglang_world, start_from(sglang_world, 14))


# --- no false alarm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "in turns"])
def test_a_patch_finds_its_base_also_where_the_weights_were_away(world, colocated):
    state = start_from(world, 15)
    token = 1 if colocated else 0
    for step in range(4):
        if colocated:
            world.on_loop(world.worker.occupy([], 100 + 10 * step + token))
            world.on_loop(world.worker.occupy(["weights"], 102 + 10 * step))
        state = stepped(state, step)
        assert world.publish_next(state).patched == ("rollout:0",)
        if colocated:
            world.on_loop(world.worker.occupy(AWAKE, 104 + 10 * step))
    assert serves(world, state)


@pytest.mark.parametrize(("engine", "syncs"), [("hf", 850), ("hf_bfloat16", 1000), ("sglang", 150)])
def test_a_thousand_syncs_raise_no_alarm(request, engine, syncs):
    """A step changes few elements, or it moves all by a learning rate of 1e-6, which leaves most of them in bfloat16 as they are."""
    world = request.getfixturevalue(f"{engine}_world")
    dtype = getattr(torch, world.spec.model.dtype)
    masters = random_state(16)
    for step in range(syncs):
        if step % 5 == 0:
            masters = random_state(1000 + step)
        elif step % 5 == 1:
            masters = {name: tensor + 1e-6 for name, tensor in masters.items()}
        else:
            masters = stepped(masters, step)
        state = {name: tensor.to(dtype) for name, tensor in masters.items()}
        report = world.publish_next(state)
        assert report.acked == ("rollout:0",)
        if step % 50 == 0:
            assert serves(world, state)
    assert serves(world, state)
