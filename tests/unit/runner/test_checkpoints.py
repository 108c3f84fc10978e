"""Resuming: files and checkpoints tell the history of the present weights, and nothing of another one."""

import json
import os
import threading

import pytest

from rl_core.api.errors import ConfigError, DataError, InfrastructureError, StorageFull, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.runner.checkpoints import Checkpoints
from rl_core.workers.result import WorkerErrors

NAMES = ("ledger.jsonl", "metrics.jsonl")


class Actor:
    """Stands in for the actor group: its shards are one file."""

    def save_checkpoint(self, folder, step):
        with open(f"{folder}/shard", "w") as file:
            file.write(str(step))
        return self

    def load(self, folder):
        pass

    def wait(self, timeout):
        return []


@pytest.fixture
def spec():
    return RLJobSpec.model_validate(
        {
            "model": {"path": "/models/tiny"},
            "data": {"train": "/data/train.jsonl"},
            "algorithm": {"steps": 10},
            "actor": {"optimizer": {"learningRate": 1.0e-3}},
            "env": {"type": "math"},
        }
    )


@pytest.fixture
def output(tmp_path):
    for name in NAMES:
        (tmp_path / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(7)))
    return tmp_path


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def saved(spec, output, *numbers):
    """Save at these steps while the history grows to step 6."""
    checkpoints = Checkpoints(spec, output=output, epoch=0)
    whole = {name: (output / name).read_text().splitlines(keepends=True) for name in NAMES if (output / name).exists()}
    for step in numbers:
        for name, lines in whole.items():
            (output / name).write_text("".join(lines[: step + 1]))
        checkpoints.save(step, [Actor()], {"step": step}, version=step, reward=None)
    for name, lines in whole.items():
        (output / name).write_text("".join(lines))


def test_a_run_lost_before_its_first_checkpoint_begins_again_without_its_lines(spec, output):
    again = Checkpoints(spec, output=output, epoch=1)
    assert again.find("auto") is None
    again.begin_afresh()
    for name in NAMES:
        assert steps(output / name) == []
        assert steps(output / name.replace(".jsonl", ".lost.jsonl")) == list(range(7))


def test_a_resume_from_an_older_checkpoint_leaves_the_later_ones_behind(spec, output):
    saved(spec, output, 2, 4, 6)
    resumed = Checkpoints(spec, output=output, epoch=1)
    state = resumed.restore(resumed.find(str(output / "checkpoints/step-00000002")), Actor().load)
    assert state["step"] == 2
    assert all(steps(output / name) == [0, 1, 2] for name in NAMES)
    assert Checkpoints(spec, output=output, epoch=2).find("auto").step == 2


def test_a_fresh_start_beside_an_earlier_run_never_resumes_from_it(spec, output):
    saved(spec, output, 4)
    Checkpoints(spec, output=output, epoch=1).begin_afresh()
    assert Checkpoints(spec, output=output, epoch=2).find("auto") is None


def test_a_restart_goes_on_from_the_given_path_until_the_run_has_saved(spec, output, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    saved(spec, other, 4)
    given = str(other / "checkpoints/step-00000004")
    saved(spec, output, 6)  # of an earlier run in this folder, epoch 0
    restarted = Checkpoints(spec, output=output, epoch=3)
    assert restarted.find(given, first_epoch=2).path == other / "checkpoints/step-00000004"
    restarted.restore(restarted.find(given, first_epoch=2), Actor().load)
    restarted.save(5, [Actor()], {"step": 5}, version=5, reward=None)
    assert Checkpoints(spec, output=output, epoch=4).find(given, first_epoch=2).step == 5


def test_the_first_start_takes_the_given_path_whatever_else_is_there(spec, output):
    saved(spec, output, 4, 6)  # epoch 0, by a run with another output folder and the same checkpoint.path
    given = output / "checkpoints/step-00000004"
    assert Checkpoints(spec, output=output, epoch=0).find(str(given), first_epoch=0).path == given


FULL, BROKEN, GONE = StorageFull("no room"), InfrastructureError("stale handle"), WorkerLost("actor:1 is gone")


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([FULL, FULL], StorageFull),
        ([BROKEN, FULL], StorageFull),
        ([BROKEN, BROKEN], InfrastructureError),
        ([FULL, GONE], WorkerLost),
        ([FULL, DataError("a bug")], WorkerErrors),
    ],
)
def test_what_several_ranks_meet_on_one_storage_is_one_refusal_and_leaves_nothing_behind(spec, output, ranks, told):
    checkpoints = Checkpoints(spec, output=output, epoch=0)

    class Refused(Actor):
        def wait(self, timeout):
            raise WorkerErrors("actor.save_checkpoint failed on 2 of 2 ranks, the first: no room", ranks)

    with pytest.raises(told) as error:
        checkpoints.save(3, [Refused()], {}, version=3, reward=None)
    assert type(error.value) is told and checkpoints.last_step is None
    assert not list((output / "checkpoints").glob(".step-*"))


def test_a_checkpoint_that_finds_no_room_makes_some_and_tells_what_went(spec, output):
    saved(spec, output, 2, 4, 5)
    checkpoints, refusals = Checkpoints(spec, output=output, epoch=0), [FULL] * 3

    class Crowded(Actor):
        def wait(self, timeout):
            if refusals:
                raise WorkerErrors("actor.save_checkpoint failed on 1 of 1 ranks", [refusals.pop()])
            return []

    with pytest.raises(StorageFull):  # two may go
        checkpoints.save(6, [Crowded()], {"step": 6}, version=6, reward=None)
    assert checkpoints.store.complete_steps() == [5]
    checkpoints.save(6, [Crowded()], {"step": 6}, version=6, reward=None)
    assert checkpoints.store.complete_steps() == [5, 6]
    assert checkpoints.describe("there")["deletedForRoom"] == ["step-00000002", "step-00000004"]


class Writing(Actor):
    """Ranks that are done when `ended` says so; `refusals` first."""

    def __init__(self, *refusals):
        self.ended, self.refusals = threading.Event(), list(refusals)

    def save_checkpoint(self, folder, step, in_background=False):
        assert in_background
        return super().save_checkpoint(folder, step)

    def wait(self, timeout):
        assert self.ended.wait(60)
        if self.refusals:
            raise self.refusals.pop()
        return [{"shard": "ff"}]


def test_a_checkpoint_in_the_background_is_seen_when_its_ranks_are_done(spec, output):
    checkpoints, actor = Checkpoints(spec, output=output, epoch=0), Writing()
    state = {"step": 3}
    assert checkpoints.save(3, [actor], state, version=3, reward=None, in_background=True) is None
    state["step"] = 4  # training goes on
    assert checkpoints.settle() is None and checkpoints.store.complete_steps() == [] and checkpoints.last_step is None
    actor.ended.set()
    path = checkpoints.settle(wait=True)
    assert path.endswith("step-00000003") and checkpoints.last_step == 3 and checkpoints.settle(wait=True) is None
    assert checkpoints.store.latest().manifest.files["shard"].digest == "ff"
    assert json.loads((output / "checkpoints/step-00000003/runner.json").read_text())["step"] == 3


def test_one_in_the_background_that_finds_no_room_makes_some_for_the_next(spec, output):
    saved(spec, output, 2, 4)
    checkpoints, actor = Checkpoints(spec, output=output, epoch=0), Writing(FULL)
    actor.ended.set()
    checkpoints.save(5, [actor], {"step": 5}, version=5, reward=None, in_background=True)
    with pytest.raises(StorageFull):
        checkpoints.settle(wait=True)
    assert checkpoints.store.complete_steps() == [4] and not list((output / "checkpoints").glob(".step-*"))
    checkpoints.save(6, [actor], {"step": 6}, version=6, reward=None, in_background=True)
    assert checkpoints.settle(wait=True) and checkpoints.store.complete_steps() == [4, 6]


def test_the_manifest_tells_the_version_and_the_digest_of_the_weights(spec, output):
    checkpoints = Checkpoints(spec, output=output, epoch=0)
    checkpoints.save(3, [Actor()], {"step": 3}, version=4, weights_digest="d", reward=None)
    assert checkpoints.store.latest().manifest.versions == {"policy": 4, "digest": "d"}


def test_what_the_runner_adds_to_a_checkpoint_is_on_the_disk_before_it_is_published(spec, output, monkeypatch):
    """Retention deletes older ones right after: a power cut must not take the new one's state with it."""
    synced, plain = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: plain(descriptor) or synced.add(os.fstat(descriptor).st_ino))
    saved(spec, output, 2)
    published = output / "checkpoints/step-00000002"
    for path in (published / "runner.json", published / "manifest.json", published, published.parent):
        assert path.stat().st_ino in synced, path


def resume_as(spec, output, **changes):
    """Resume from the checkpoint at step 2 as a job with other fields; `changes` are YAML paths with `__` for the dot."""
    changed = spec.model_dump(mode="json", by_alias=True)
    for path, value in changes.items():
        *blocks, field = path.split("__")
        block = changed
        for name in blocks:
            block = block[name]
        block[field] = value
    resumed = Checkpoints(RLJobSpec.model_validate(changed), output=output, epoch=1)
    return resumed.restore(resumed.find("auto"), Actor().load)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm__groupSize": 4}, r"in algorithm\.groupSize: 8 \(saved\), 4 \(now\); restore"),
        ({"actor__optimizer__weightDecay": 0.5}, r"actor\.optimizer\.weightDecay: 0\.01 \(saved\), 0\.5 \(now\)"),
        ({"env__options": {"comparator": "exact"}}, r"env\.options\.comparator: None \(saved\), 'exact' \(now\)"),
        ({"env__type": "reward", "env__reward": "mine:f"}, r"env\.reward: None \(saved\), 'mine:f' \(now\); env\.type"),
        ({"rollout__maxSequenceLength": 99}, r"rollout\.maxSequenceLength: None \(saved\), 99 \(now\)"),
    ],
)
def test_a_resume_that_would_compute_something_else_is_refused_unless_allowed(spec, output, changes, told):
    saved(spec, output, 2)
    with pytest.raises(ConfigError, match=told):
        resume_as(spec, output, **changes)
    assert resume_as(spec, output, **changes, checkpoint__allowSpecChange=True)["step"] == 2


def test_a_resume_may_move_folders_go_on_longer_and_faster_and_on_another_layout(spec, output):
    saved(spec, output, 2)
    changes = {
        "model__path": "/elsewhere",
        "algorithm__steps": 99,
        "actor__optimizer__learningRate": 1.0,
        "actor__microBatchTokens": 99,
        "actor__backend": "megatron",
        "actor__optimizer__distributed": False,
    }
    assert resume_as(spec, output, **changes)["step"] == 2


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("harm", [damage, os.unlink], ids=["a flipped bit", "deleted"])
def test_a_damaged_history_ends_the_resume_with_the_way_out_and_nothing_is_cut(spec, output, name, harm):
    saved(spec, output, 4, 6)
    harm(output / name)
    before = {path: path.read_bytes() for path in output.glob("*.jsonl")}
    resumed = Checkpoints(spec, output=output, epoch=1)
    with pytest.raises(DataError, match=rf"{name} must hold the 7 lines.*--resume .*step-00000006 --output OTHER"):
        resumed.restore(resumed.find("auto"), Actor().load)
    assert {path: path.read_bytes() for path in output.glob("*.jsonl")} == before
    assert resumed.store.complete_steps() == [4, 6]


def test_a_checkpoint_vouches_for_no_history_of_another_folder_and_still_does_after_its_own_moved(
    spec, output, tmp_path
):
    saved(spec, output, 6)
    other = tmp_path / "other"
    other.mkdir()
    successor = Checkpoints(spec, output=other, epoch=0)
    given = str(output / "checkpoints/step-00000006")
    assert successor.restore(successor.find(given), Actor().load)["step"] == 6
    moved = output.with_name("moved")
    output.rename(moved)
    (moved / "ledger.jsonl").unlink()
    again = Checkpoints(spec, output=moved, epoch=1)
    with pytest.raises(DataError, match=r"ledger\.jsonl must hold"):
        again.restore(again.find("auto"), Actor().load)
    moved.rename(output)


def test_auto_goes_to_the_older_checkpoint_names_what_it_passed_over_and_tells_it(spec, output):
    saved(spec, output, 2, 4, 6)
    damage(output / "checkpoints/step-00000006/shard")
    damage(output / "checkpoints/step-00000004/manifest.json")
    resumed = Checkpoints(spec, output=output, epoch=1)
    chosen = resumed.find("auto")
    assert chosen.step == 2 and resumed.restore(chosen, Actor().load)["step"] == 2
    told = resumed.describe("there")
    newest, newer = told["passedOver"]
    assert told["resumedFrom"] == 2
    assert "step-00000006: " in newest and "file shard has digest" in newest and "step-00000004: " in newer


def test_auto_never_begins_anew_beside_damaged_checkpoints(spec, output):
    saved(spec, output, 2)
    damage(output / "checkpoints/step-00000002/shard")
    with pytest.raises(DataError, match="got only damaged ones: step-00000002: .*move them away to begin anew"):
        Checkpoints(spec, output=output, epoch=1).find("auto")


@pytest.fixture
def first(spec, output):
    """A run with checkpoints at steps 2 and 4, and room beside it."""
    folder = output / "volume/first"
    folder.mkdir(parents=True)
    for name in NAMES:
        (output / name).rename(folder / name)
    saved(spec, folder, 2, 4)
    return folder


def successor(spec, first, **wanted):
    """A run beside `first`, told to go on from there."""
    folder = first.with_name("heir")
    folder.mkdir(exist_ok=True)
    whole = spec.model_dump(mode="json", by_alias=True)
    whole["checkpoint"]["resumeFrom"] = wanted
    return Checkpoints(RLJobSpec.model_validate(whole), output=folder, epoch=0)


def test_a_run_goes_on_from_another_ones_checkpoint_with_its_history_and_then_from_its_own(spec, first):
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    heir = successor(spec, first, job="first", step=4)
    assert heir.restore(heir.find("none"), Actor().load)["step"] == 4 and heir.last_step == 4
    for name in NAMES:
        assert steps(first.with_name("heir") / name) == [0, 1, 2, 3, 4], name
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    heir.save(5, [Actor()], {"step": 5}, version=5, reward=None)
    again = successor(spec, first, job="first", step=4)
    assert again.restore(again.find("auto"), Actor().load)["step"] == 5


def test_a_run_that_is_lost_before_its_first_checkpoint_begins_at_the_other_ones_again(spec, first):
    heir = successor(spec, first, job="first")
    heir.restore(heir.find("none"), Actor().load)
    with (first.with_name("heir") / NAMES[0]).open("a") as file:
        file.write(json.dumps({"step": 5}) + "\n")
    again = successor(spec, first, job="first")
    again.restore(again.find("auto"), Actor().load)
    assert steps(first.with_name("heir") / NAMES[0]) == [0, 1, 2, 3, 4]


def test_a_checkpoint_without_its_history_is_used_and_the_gap_is_told(spec, first, caplog):
    (first / "ledger.jsonl").unlink()
    heir = successor(spec, first, path=str(first))
    heir.restore(heir.find("none"), Actor().load)
    assert "the one here begins after step 4" in caplog.text
    assert not (first.with_name("heir") / "ledger.jsonl").exists()
    assert steps(first.with_name("heir") / "metrics.jsonl") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_a_history_that_was_damaged_is_not_taken_over(spec, first, name):
    text = (first / name).read_bytes()
    (first / name).write_bytes(text.replace(b"3", b"7", 1))
    heir = successor(spec, first, job="first")
    with pytest.raises(DataError, match=f"first/{name} must hold the 5 lines"):
        heir.restore(heir.find("none"), Actor().load)


def test_on_a_cluster_another_runs_checkpoint_lies_on_a_volume_of_the_actor(spec, first):
    whole = spec.model_dump(mode="json", by_alias=True)
    whole["checkpoint"] |= {"path": str(first.parent), "resumeFrom": {"job": "first"}}
    whole["actor"]["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    for mount, found in ((first.parent.parent, 4), (first.parent.parent / "other", None)):
        whole["actor"]["volumeMounts"] = [{"name": "v", "mountPath": str(mount)}]
        heir = Checkpoints(RLJobSpec.model_validate(whole), output=first.with_name("heir"), epoch=1, in_cluster=True)
        if found is None:
            with pytest.raises(ConfigError, match="must lie in .*other"):
                heir.find("auto")
        else:
            assert heir.find("auto").step == found


def test_a_checkpoint_of_another_model_is_refused_whatever_may_change(spec, output, tmp_path):
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
        "max_position_embeddings": 9,
    }
    whole = spec.model_dump(mode="json", by_alias=True)
    for name, hidden in (("a", 64), ("b", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"hidden_size": hidden}))
    first, other = (
        RLJobSpec.model_validate(
            whole | {"model": {"path": str(tmp_path / name)}, "checkpoint": {"allowSpecChange": True}}
        )
        for name in ("a", "b")
    )
    saved(first, output, 2)
    resumed = Checkpoints(other, output=output, epoch=1)
    with pytest.raises(ConfigError, match=r"hidden 64 \(saved\), 128 \(now\).*set model.path to the model"):
        resumed.restore(resumed.find("auto"), Actor().load)
    again = Checkpoints(first, output=output, epoch=1)
    assert again.restore(again.find("auto"), Actor().load)["step"] == 2


def test_what_a_rule_found_wrong_is_set_aside_and_the_last_good_checkpoint_outlives_retention(spec, output):
    whole = spec.model_dump(mode="json", by_alias=True)
    whole["checkpoint"]["keep"] = 1
    checkpoints = Checkpoints(RLJobSpec.model_validate(whole), output=output, epoch=0)
    for step, wrong in ((2, 0), (4, 0), (5, 1), (6, 2)):
        checkpoints.save(step, [Actor()], {"step": step}, version=step, reward=None, num_violating_steps=wrong)
    assert checkpoints.store.complete_steps() == [4, 6]
    assert checkpoints.set_aside_after(4).endswith("step-00000004") and checkpoints.last_step == 4
    assert Checkpoints(spec, output=output, epoch=1).find("auto").step == 4
    assert (output / "checkpoints/lost-step-00000006").is_dir()
    assert checkpoints.set_aside_after(1) == "" and checkpoints.last_step is None
