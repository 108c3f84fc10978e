"""Profiles of training steps: one file per step that was asked for, with what the step computed."""

import gzip
import json

import torch

from tests.unit.actors.actor_steps import train


def test_chosen_steps_are_profiled_and_compute_what_they_do_without(make_actor, records, tmp_path, monkeypatch):
    monkeypatch.setenv("RLJOB_OUTPUT", str(tmp_path))
    actors = [
        make_actor(algorithm__recomputeLogProbs=True, **options) for options in ({"actor__profileSteps": [2, 9]}, {})
    ]
    for step in (1, 2, 3):
        for actor in actors:
            train(actor, records, step)
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["step-0000002-rank-0.json.gz"]
    for profiled, other in zip(*(actor.manager.model.parameters() for actor in actors), strict=True):
        assert torch.equal(profiled, other)

    trace = json.loads(gzip.decompress((tmp_path / "profiles/step-0000002-rank-0.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert {"ScoresFromHidden", "ScoresFromHiddenBackward", "Optimizer.step#FusedAdamW.step"} <= set(names)
    # One forward pass per micro-batch scores the tokens before the update, and one trains on them.
    assert names.count("ScoresFromHidden") == 2 * names.count("ScoresFromHiddenBackward")


def test_a_storage_that_refuses_the_profile_does_not_end_the_step(make_actor, records, tmp_path, monkeypatch, caplog):
    (tmp_path / "profiles").write_text("in the way")
    monkeypatch.setenv("RLJOB_OUTPUT", str(tmp_path))
    assert train(make_actor(actor__profileSteps=[1]), records) is not None
    assert "step 1 has no profile" in caplog.text
