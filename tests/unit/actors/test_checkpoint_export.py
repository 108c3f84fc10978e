"""`rljob export`: what it writes from a checkpoint is what the trainer exports, and what it cannot write it refuses by name."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.api.errors import ConfigError, DataError
from rl_core.checkpoint.store import CheckpointStore
from rl_core.cli.export import export
from rl_core.runner.checkpoints import STATE_FILE
from rl_core.runner.invariants import state_of
from tests import actor_samples
from tests.unit.actors.actor_steps import train

ADAPTERS = {"rank": 4, "alpha": 12.0}
CRITIC = {"algorithm__name": "gae", "algorithm__critic": {"separate": True}}


@pytest.fixture
def make_run(make_actor, make_spec, records, tmp_path):
    """Make the output folder of a run of two steps, whose folder `model` the trainer has exported; return it and the actor."""

    def make(**changes):
        actor = make_actor(**changes)
        for step in (1, 2):
            train(actor, records, step)
        store = CheckpointStore(tmp_path / "out/checkpoints", keep=1)
        staging = store.begin(2, 0)
        digests = actor.save_checkpoint(str(staging), 2)
        (staging / STATE_FILE).write_text(json.dumps({"step": 2, **state_of(make_spec(**changes))}))
        store.publish(digests=digests)
        actor.export_hf(str(tmp_path / "out/model"))
        return tmp_path / "out", actor

    return make


def write(source, target, *, step="latest", merge=False, model=None):
    return export(source, target, step=step, merge=merge, model=model)


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__lora": ADAPTERS},
        {"model__lora": ADAPTERS | {"layers": [1]}, "model__dtype": "bfloat16"},
        {"model__lora": ADAPTERS, "model__dtype": "bfloat16", "actor__backend": "fsdp1"},
        CRITIC | {"model__lora": ADAPTERS},
    ],
    ids=["all weights", "adapters", "bfloat16", "bfloat16 fsdp1", "critic"],
)
def test_the_model_is_that_which_the_trainer_exports_byte_for_byte(make_run, tmp_path, changes):
    out, _ = make_run(**changes)
    assert write(out, tmp_path / "new/folder", merge="model__lora" in changes) == 0
    exported = {name: data for name, data in content(out / "model").items() if not name.startswith("adapter/")}
    assert content(tmp_path / "new/folder") == exported


def test_the_adapters_are_those_which_the_trainer_exports_and_a_checkpoint_may_be_named(make_run, tmp_path, capsys):
    out, _ = make_run(model__lora=ADAPTERS)
    (tmp_path / "empty").mkdir()
    write(out / "checkpoints/step-00000002", tmp_path / "empty", step="2")
    assert content(tmp_path / "empty") == content(out / "model/adapter")
    assert "has the adapters of step 2" in capsys.readouterr().out


def test_the_merged_model_gives_the_logits_of_base_and_adapters(make_run, tmp_path):
    out, actor = make_run(model__lora=ADAPTERS)
    write(out, tmp_path / "merged", merge=True)
    theirs, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), torch.randint(0, 24, (3, 11))
    with torch.no_grad():
        assert torch.allclose(actor.manager.model(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


def test_what_cannot_be_exported_is_refused_by_name_and_leaves_nothing(make_run, model_folder, tmp_path):
    out, actor = make_run(model__lora=ADAPTERS)
    target, other = tmp_path / "target", tmp_path / "other"
    actor.export_hf(str(other))
    refused = [
        (tmp_path / "none", {}, ConfigError, "OUT must be the output folder of a run or a checkpoint"),
        (other, {}, ConfigError, "--step must be that of a complete checkpoint .* there are: none"),
        (out, {"step": "7"}, ConfigError, "--step must be that of a complete checkpoint .* got 7; there are: 2"),
        (out, {"model": str(other)}, DataError, "on which the checkpoint's adapters were trained"),
    ]
    for source, options, error, message in refused:
        with pytest.raises(error, match=message):
            write(source, target, **options)
    with pytest.raises(ConfigError, match="FOLDER must be new or empty, got .*/other"):
        write(out, other)
    shard = next(out.glob("checkpoints/*/model/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"only damaged ones: step-00000002: file model/shard"):
        write(out, target)
    assert not target.exists()


def test_an_export_that_fails_half_way_leaves_nothing(make_run, tmp_path):
    out, _ = make_run()
    with pytest.raises(ConfigError, match="--merge needs a run with model.lora"):
        write(out, tmp_path / "to/target", merge=True)
    larger = actor_samples.make_model(tmp_path / "larger", family="qwen3")
    with pytest.raises(DataError, match="belongs to another model"):
        write(out, tmp_path / "to/target", model=str(larger))
    assert list((tmp_path / "to").iterdir()) == []
