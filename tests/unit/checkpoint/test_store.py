"""A checkpoint is complete or invisible, whatever happens while it is written."""

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys

import blake3
import pytest

from rl_core.api.errors import ConfigError, DataError, EpochFenced, InfrastructureError
from rl_core.checkpoint.files import write_file
from rl_core.checkpoint.manifest import FileEntry, Manifest, read_manifest
from rl_core.checkpoint.store import CheckpointStore


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def save(store, step, *, epoch=0, content=b"weights", **details):
    staging = store.begin(step, epoch)
    (staging / "model").mkdir()
    write_file(staging / "model" / "shard-00001.safetensors", content)
    write_file(staging / "runner.json", b"{}")
    return store.publish(staging, **details)


def visible(store):
    return sorted(path.name for path in store.root.iterdir() if not path.name.startswith("."))


def hidden(store):
    return sorted(path.name for path in store.root.iterdir() if path.name.startswith((".step", ".trash")))


def test_a_checkpoint_appears_only_when_published(store):
    staging = store.begin(50, 2)
    assert staging == store.root / ".step-00000050.2"
    write_file(staging / "model.bin", b"x")
    assert store.complete_steps() == [] and store.latest() is None
    published = store.publish(staging, layout={"world_size": 2}, versions={"policy": 50}, spec_digest="d")
    assert published.path == store.root / "step-00000050"
    assert store.complete_steps() == [50]
    manifest = json.loads((published.path / "manifest.json").read_text())
    assert (manifest["step"], manifest["epoch"]) == (50, 2)
    assert manifest["files"]["model.bin"]["bytes"] == 1
    assert (manifest["layout"], manifest["versions"], manifest["spec_digest"]) == (
        {"world_size": 2},
        {"policy": 50},
        "d",
    )
    assert hidden(store) == []


def test_a_digest_that_the_writer_tells_is_what_the_file_is_held_against(store):
    """What became of the bytes on their way to the disk shows when they are read."""
    told = {"model/shard-00001.safetensors": blake3.blake3(b"sent").hexdigest()}
    good = save(store, 1, content=b"sent", digests=told)
    good.manifest.verify(good.path)
    with pytest.raises(DataError, match=r"shard-00001\.safetensors has digest"):
        bad = save(store, 2, content=b"kept", digests=told)
        bad.manifest.verify(bad.path)


def test_files_in_folders_are_listed_with_their_path(store):
    manifest = save(store, 1).manifest
    assert sorted(manifest.files) == ["model/shard-00001.safetensors", "runner.json"]


def test_latest_is_the_highest_step_and_usable_as_a_path(store):
    for step in (10, 9, 100):
        save(store, step)
    assert store.latest().step == 100
    assert os.fspath(store.latest()) == str(store.root / "step-00000100")


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text('{"format": 99}'),
        lambda folder: (folder / "runner.json").unlink(),
        lambda folder: (folder / "model" / "shard-00001.safetensors").write_bytes(b"weigh"),
    ],
    ids=["no manifest", "half a manifest", "foreign manifest", "missing file", "short file"],
)
def test_a_damaged_checkpoint_is_invisible_and_logged_once(store, harm, caplog):
    save(store, 1)
    harm(save(store, 2).path)
    with caplog.at_level(logging.WARNING):
        assert store.complete_steps() == [1]
        assert store.latest().step == 1
    assert len(caplog.records) == 1 and "step-00000002" in caplog.text
    with pytest.raises(ConfigError, match="step-00000002"):
        store.resolve(store.root / "step-00000002")


def test_flipped_bytes_of_the_same_size_are_found_by_the_digest(store):
    published = save(store, 1)
    (published.path / "runner.json").write_bytes(b"[]")
    assert store.complete_steps() == [1]
    with pytest.raises(DataError, match=r"runner\.json has digest"):
        published.manifest.verify(published.path)
    published.manifest.verify(published.path, ("model/shard-00001.safetensors",))


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_best=1)
    for step, reward in [(1, 0.1), (2, 0.9), (3, 0.5), (4, 0.6), (5, float("nan"))]:
        save(store, step, metrics={"reward": reward})
    assert store.complete_steps() == [2, 4, 5]
    assert store.best().step == 2
    assert hidden(store) == []


def test_the_next_checkpoint_replaces_one_made_in_passing(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_best=1)
    for step, passing in [(1, False), (2, True), (3, True), (4, False), (5, False), (6, True)]:
        save(store, step, passing=passing)
        assert store.complete_steps()[-1] == step
    assert store.complete_steps() == [4, 5, 6]


def test_room_is_made_oldest_first_but_never_with_the_newest_or_the_one_resumed_from(tmp_path):
    store = CheckpointStore(tmp_path, keep=9, keep_best=1)
    for step in (1, 2, 3, 4, 5):
        save(store, step, metrics={"reward": 1.0 if step == 2 else 0.0})
    store.resolve(str(tmp_path / "step-00000001"))
    assert store.set_aside_after(4, 1) == [5]
    gone = iter(store.make_room, None)
    assert list(gone) == ["lost-step-00000005", "step-00000003", "step-00000002"]
    assert store.complete_steps() == [1, 4] and hidden(store) == []


def test_best_takes_the_smallest_when_asked_and_the_newer_of_equals(tmp_path):
    store = CheckpointStore(tmp_path, keep=9, metric="loss", mode="min")
    for step, loss in [(1, 0.5), (2, 0.1), (3, 0.1), (4, 0.7)]:
        save(store, step, metrics={"loss": loss})
    assert store.best().step == 3
    assert CheckpointStore(tmp_path, keep=9).best() is None


def test_the_checkpoint_resumed_from_is_never_retired(tmp_path):
    for step in (1, 2):
        save(CheckpointStore(tmp_path, keep=5), step)
    store = CheckpointStore(tmp_path, keep=1)
    assert store.resolve(str(tmp_path / "step-00000001")).step == 1
    save(store, 3)
    assert store.complete_steps() == [1, 3]


def test_resolve_auto_none_and_path(store, tmp_path):
    assert store.resolve("auto") is None
    save(store, 1)
    save(store, 2)
    assert store.resolve("none") is None
    assert store.resolve("auto").step == 2
    assert store.resolve(store.root / "step-00000001").step == 1
    with pytest.raises(ConfigError, match="nowhere"):
        store.resolve(tmp_path / "nowhere")


def test_the_same_step_again_replaces_the_old_one(store):
    save(store, 7, content=b"first")
    save(store, 7, epoch=1, content=b"second")
    assert (store.latest().path / "model" / "shard-00001.safetensors").read_bytes() == b"second"
    assert store.latest().manifest.epoch == 1
    assert hidden(store) == []


def test_a_replacement_killed_between_its_two_renames_is_finished_by_the_next_writer(store):
    save(store, 7, content=b"first")
    staging = store.begin(7, 1)
    shutil.copytree(store.root / "step-00000007", staging, dirs_exist_ok=True)
    (store.root / "step-00000007").rename(store.root / ".trash-step-00000007")
    assert store.complete_steps() == []
    store.begin(8, 2)
    assert store.complete_steps() == [7]


def test_a_resume_finds_a_replacement_killed_between_its_two_renames(store):
    save(store, 40)
    save(store, 50, content=b"old")
    staging = store.begin(50, 1)
    write_file(staging / "runner.json", b"{}")
    manifest = Manifest.of_folder(staging, step=50, epoch=1)
    write_file(staging / "manifest.json", manifest.encode())
    (store.root / "step-00000050").rename(store.root / ".trash-step-00000050")
    found = CheckpointStore(store.root, keep=3).resolve("auto")
    assert (found.step, found.manifest.epoch) == (50, 1)


def test_checkpoints_after_the_one_resumed_from_are_set_aside_and_not_lost(store):
    for step in (10, 20, 30):
        save(store, step, content=b"left")
    resumed = CheckpointStore(store.root, keep=1)
    assert resumed.resolve(store.root / "step-00000010").step == 10
    assert resumed.set_aside_after(10, 1) == [20, 30]
    assert resumed.complete_steps() == [10] and resumed.latest().step == 10
    save(resumed, 20, epoch=1)
    assert resumed.complete_steps() == [10, 20], "the new history's checkpoint must outlive the old one's"
    assert resumed.set_aside_after(-1, 1) == [10, 20]
    lost = ["lost-step-00000010", "lost-step-00000020", "lost-step-00000020.1", "lost-step-00000030"]
    assert visible(store) == lost, "nothing that was set aside before is replaced"


def test_an_older_epoch_sets_nothing_of_a_newer_one_aside(store):
    save(store, 10, epoch=2)
    with pytest.raises(EpochFenced, match="written by epoch 2, got epoch 1"):
        store.set_aside_after(-1, 1)
    assert store.complete_steps() == [10]


def test_an_older_epoch_can_neither_begin_nor_publish(store):
    old = store.begin(5, 1)
    write_file(old / "model.bin", b"old")
    newer = CheckpointStore(store.root, keep=3)
    save(newer, 4, epoch=2)
    with pytest.raises((EpochFenced, InfrastructureError)):
        store.publish(old)
    with pytest.raises(EpochFenced, match="epoch 2"):
        store.begin(6, 1)
    assert store.complete_steps() == [4]


def test_an_older_epoch_is_refused_at_the_rename_too(store):
    staging = store.begin(5, 1)
    write_file(staging / "model.bin", b"old")
    (store.root / ".epoch").write_text("2")
    with pytest.raises(EpochFenced, match="epoch 2"):
        store.publish(staging)
    assert store.complete_steps() == [] and hidden(store) == []


def test_an_older_epoch_whose_folder_a_newer_one_cleared_away_is_told_so(store):
    staging = store.begin(50, 1)
    CheckpointStore(store.root, keep=3).begin(50, 2)
    with pytest.raises(EpochFenced, match="written by epoch 2"):
        store.publish(staging)


def test_storage_that_cannot_tell_its_writer_is_an_infrastructure_failure(store):
    staging = store.begin(50, 1)
    fence = store.root / ".epoch"
    fence.unlink()
    fence.mkdir()  # reading it fails, as on a volume that is gone
    with pytest.raises(InfrastructureError, match="checkpoint of step 50"):
        store.publish(staging)


def test_begin_removes_what_killed_writers_left(store):
    save(store, 1)
    write_file(store.begin(2, 0) / "half", b"x")
    (store.root / ".trash-step-00000000").mkdir()
    staging = store.begin(2, 1)
    assert hidden(store) == [staging.name]
    assert list(staging.iterdir()) == []
    assert store.complete_steps() == [1]


def test_what_a_killed_writer_left_is_room_for_the_next_one_on_a_full_disk(store, monkeypatch):
    left = store.begin(2, 0)

    def write_into_what_is_left(path, data):
        if left.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_file(path, data)

    monkeypatch.setattr("rl_core.checkpoint.store.write_file", write_into_what_is_left)
    assert store.begin(2, 1).is_dir() and not left.exists()
    with pytest.raises(EpochFenced):
        store.begin(3, 0)


def test_abort_removes_the_staging_folder_and_may_be_called_again(store):
    staging = store.begin(3, 0)
    store.abort(staging)
    store.abort(staging)
    store.abort()
    assert hidden(store) == [] and store.latest() is None


def test_a_full_disk_at_the_manifest_loses_nothing_and_says_what_to_do(store):
    save(store, 1)
    staging = store.begin(2, 0)
    write_file(staging / "model.bin", b"x")
    (staging / "manifest.json").symlink_to("/dev/full")
    with pytest.raises(
        InfrastructureError, match=r"step 2 could not be written.*No space left.*bytes free.*checkpoint\.keep"
    ):
        store.publish(staging)
    assert store.complete_steps() == [1] and hidden(store) == []
    save(store, 2)
    assert store.complete_steps() == [1, 2]


def test_a_file_size_limit_at_the_manifest_loses_nothing(store):
    save(store, 1)
    staging = store.begin(2, 0)
    write_file(staging / "model.bin", b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(InfrastructureError, match="File too large"):
            store.publish(staging)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.complete_steps() == [1] and hidden(store) == []


def test_a_root_that_cannot_be_made_is_an_infrastructure_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InfrastructureError, match="file"):
        CheckpointStore(tmp_path / "file" / "checkpoints", keep=1).begin(1, 0)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1, "keep_best": -1}, {"keep": 1, "mode": "best"}])
def test_impossible_retention_is_refused(tmp_path, options):
    with pytest.raises(ConfigError, match="got"):
        CheckpointStore(tmp_path, **options)


def test_publish_needs_a_folder_of_begin(store, tmp_path):
    with pytest.raises(RuntimeError, match="begin"):
        store.publish()
    with pytest.raises(ValueError, match="begin"):
        store.publish(tmp_path)


def test_reading_an_empty_or_absent_root_finds_nothing(tmp_path):
    store = CheckpointStore(tmp_path / "absent", keep=1)
    assert (store.complete_steps(), store.latest(), store.best()) == ([], None, None)
    assert not (tmp_path / "absent").exists()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_the_store_does_not_import_torch():
    code = "import sys, rl_core.checkpoint.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_manifest_of_a_later_version_is_read_without_what_it_adds(tmp_path):
    written = json.loads(Manifest(step=3, epoch=1, files={"a": FileEntry(bytes=1, digest="d")}).encode())
    del written["digest"]  # a later version writes one of its own over its own fields
    later = written | {"laterField": 1, "files": {"a": written["files"]["a"] | {"later": True}}}
    assert Manifest.decode(json.dumps(later).encode(), where=tmp_path) == Manifest.decode(
        json.dumps(written).encode(), where=tmp_path
    )
