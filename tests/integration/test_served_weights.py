"""The ways to serve wrong weights, each done to a real publisher, receiver and engine: none of them gets a token into training.

What proves what: checksums of the manifest prove what reached the engine's memory; an engine in another process tells the checksums of its
own tensors; the content check has the trainer score what the engine draws, and so sees whatever it computes with. One way is left out
here, an old copy in a CUDA graph, which needs a GPU.

What checksums find is shown with versions that differ by a step of 1e-6 only. The content check sees differences of more than its tolerance:
the last test of "in the engine" shows the one error that nothing finds.
"""

from dataclasses import replace

import pytest
import torch

from rl_core.api.errors import WeightsDiverged
from rl_core.messages.weights import ReceiverRefusal
from tests.integration import rollout_world
from tests.integration.rollout_world import World, put_behind_the_proof, random_state, transformers_model, wait_for
from tests.integration.wrong_weights import (
    DOWN,
    EMBEDDING,
    KEY,
    LEARNING_RATE,
    PROMPT,
    VALUE,
    WAYS,
    assert_a_tensor_that_is_not_loaded_is_named,
    assert_not_served,
    cast,
    moved,
)

AWAKE = ["weights", "kv_cache"]
VERIFY_EVERY = 3
PATCHES = {"syncer": "patch", "verifyEvery": VERIFY_EVERY}


@pytest.fixture(scope="module")
def hf_world():
    made = World(max_seq_len=64, spec={"weights": PATCHES})
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def hf_bfloat16_world():
    made = World(max_seq_len=64, spec={"model": {"path": "unused", "dtype": "bfloat16"}, "weights": PATCHES})
    made.start()
    yield made
    made.close()


def of(engine, request, monkeypatch):
    made = request.getfixturevalue(f"{engine}_world")
    if engine == "sglang":  # on the publisher's host its processes read whole versions
        monkeypatch.setattr(made, "host_token", "elsewhere")
    return made


@pytest.fixture(params=["hf", "sglang"])
def world(request, monkeypatch):
    return of(request.param, request, monkeypatch)


@pytest.fixture(params=["hf", "hf_bfloat16", "sglang"])
def world_of_any_type(request, monkeypatch):
    """SGLang in bfloat16 has its tests in test_sglang_bfloat16.py."""
    return of(request.param, request, monkeypatch)


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


def stepped(state, step, by=0.01):
    """Return `state` after a step that moves few elements of few tensors by `by`."""
    after = {name: tensor.clone() for name, tensor in state.items()}
    for name in (EMBEDDING, KEY, DOWN):
        after[name].view(-1)[step % 7 :: 97] += by
    return after


def barely_stepped(world, masters, step):
    """Return float32 weights a step of 1e-6 later, of which a patch is smaller than the whole: in bfloat16 few of all elements change."""
    return moved(masters) if world.spec.model.dtype == "bfloat16" else stepped(masters, step, LEARNING_RATE)


def held(world, name):
    """Return the bytes of a tensor in the memory of an hf engine."""
    return world.engine.weight_target.destinations()[name].clone()


# --- on the way -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_wrong_when_it_reaches_the_engine_is_not_served(world_of_any_type, way):
    assert_not_served(world_of_any_type, way)


def test_a_patch_that_is_applied_twice_is_followed_by_the_whole_version(world_of_any_type, monkeypatch):
    world, first = world_of_any_type, random_state(3)
    second = barely_stepped(world, first, 1)
    third = barely_stepped(world, second, 2)
    world.publish_next(cast(world, first))
    copies, write = [], world.publisher._patch_encoder.write

    def keep(*args, **kwargs):
        copies.append(write(*args, **kwargs))
        earlier = copies[0].patch
        again = replace(copies[-1].patch, tensors=earlier.tensors, memory=earlier.memory, nbytes=earlier.nbytes)
        return copies[-1] if len(copies) == 1 else replace(copies[-1], patch=again)

    with monkeypatch.context() as patch:
        patch.setattr(world.publisher._patch_encoder, "write", keep)
        patch.setattr(world.publisher._copies, "free", lambda memory: None)  # the first patch is needed again
        assert world.publish_next(cast(world, second)).patched == ("rollout:0",)
        assert world.publish_next(cast(world, third)).patched == ()
    assert serves(world, third)


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
    assert_a_tensor_that_is_not_loaded_is_named(sglang_world)


@pytest.mark.parametrize("engine", ["hf", "hf_bfloat16"])
def test_a_tensor_in_memory_that_is_one_step_of_1e_6_old_is_found_within_verify_every_patches(engine, request, caplog):
    """SGLang gets every tensor with each version, so that an old one is replaced by the next version."""
    world, masters = request.getfixturevalue(f"{engine}_world"), random_state(16)
    world.publish_next(cast(world, masters))
    old, masters = held(world, VALUE), moved(masters)
    world.publish_next(cast(world, masters))
    assert not torch.equal(held(world, VALUE), old)
    put_behind_the_proof(world, VALUE, old)
    reports = []
    for step in range(VERIFY_EVERY):
        masters = barely_stepped(world, masters, step)
        reports.append(world.publish_next(cast(world, masters)))
    assert [report.acked for report in reports] == [("rollout:0",)] * VERIFY_EVERY
    assert sum(not report.patched for report in reports) == 1 and VALUE in caplog.text
    assert torch.equal(held(world, VALUE), cast(world, masters)[VALUE])


def test_keys_and_values_that_are_one_step_of_1e_6_old_are_the_error_that_is_not_found(sglang_world):
    """No checksum covers the cache, and what the engine computes differs by less than rounding may: it is no alarm, and no harm either."""
    world, masters = sglang_world, start_from(sglang_world, 17)
    world.on_loop(world.worker.pause_generation("in_place"))
    after, target = moved(masters), world.engine.weight_target
    target.load(iter(after.items()), world.version)
    world.on_loop(target.resume(world.version, ""))
    world.on_loop(world.worker.continue_generation())
    assert content_check(world, after) == 1
    assert serves(world, start_from(world, 18))


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
    masters = random_state(16)
    for step in range(syncs):
        if step % 5 == 0:
            masters = random_state(1000 + step)
        elif step % 5 == 1:
            masters = moved(masters)
        else:
            masters = stepped(masters, step)
        state = cast(world, masters)
        report = world.publish_next(state)
        assert report.acked == ("rollout:0",)
        if step % 50 == 0:
            assert serves(world, state)
    assert serves(world, state)
