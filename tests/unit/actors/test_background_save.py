"""A checkpoint that is written while training goes on is of the moment it was asked for."""

import asyncio
import threading

import pytest
import torch

from rl_core.api.errors import InfrastructureError
from rl_core.checkpoint.files import file_digest, relative_files


def train(actor, records):
    actor.load_batch(records)
    actor.compute_advantages_and_returns()
    actor.run_training()


def state(actor):
    """Return copies of weights and moments."""
    moments = [tensor for entry in actor.manager.optimizer.state.values() for tensor in entry.values()]
    return [tensor.detach().clone() for tensor in (*actor.manager.model.parameters(), *moments)]


def same(left, right):
    return all(map(torch.equal, left, right))


def test_what_training_changes_meanwhile_is_not_in_it(make_actor, records, tmp_path):
    actor, other = make_actor(), make_actor()
    for step in (1, 2):  # the second is written from the memory of the first
        train(actor, records)
        expected, folder = state(actor), tmp_path / str(step)
        written = actor.save_checkpoint(str(folder), step, in_background=True)
        train(actor, records)
        digests = asyncio.run(written)
        assert digests == {name: file_digest(path) for name, path in relative_files(folder)}
        other.load_checkpoint(str(folder))
        assert same(state(other), expected) and not same(state(actor), expected)
        assert other.manager.counts.applied == actor.manager.counts.applied - 1


def test_a_step_that_comes_before_the_copy_is_made_waits_for_it(make_actor, records, tmp_path, monkeypatch):
    actor, other, arrived = make_actor(), make_actor(), threading.Event()
    train(actor, records)
    background, expected = actor.manager._background, state(actor)
    copy, release = background._copy_of, background.wait_copied

    def late(part):
        assert arrived.wait(60), "the optimizer step asks before it changes anything"
        return copy(part)

    monkeypatch.setattr(background, "_copy_of", late)
    monkeypatch.setattr(background, "wait_copied", lambda: (arrived.set(), release()))
    written = actor.save_checkpoint(str(tmp_path), 1, in_background=True)
    train(actor, records)
    asyncio.run(written)
    other.load_checkpoint(str(tmp_path))
    assert same(state(other), expected)


def test_it_has_the_bytes_of_one_that_is_waited_for(make_actor, records, tmp_path):
    actor = make_actor(actor__offload={"optimizer": True})
    train(actor, records)
    digests = actor.save_checkpoint(str(tmp_path / "waited"), 1)
    assert asyncio.run(actor.save_checkpoint(str(tmp_path / "beside"), 1, in_background=True)) == digests
    assert actor.manager.residency.optimizer_offloaded


def test_a_failure_is_told_to_who_awaits_it_and_the_next_one_succeeds(make_actor, tmp_path):
    actor = make_actor()
    (tmp_path / "actor.json").symlink_to("/dev/full")
    written = actor.save_checkpoint(str(tmp_path), 3, in_background=True)
    with pytest.raises(InfrastructureError, match="step 3, part of actor rank 0 could not be written .*No space left"):
        asyncio.run(written)
    assert "actor.json" in asyncio.run(actor.save_checkpoint(str(tmp_path / "next"), 4, in_background=True))
