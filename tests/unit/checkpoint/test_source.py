"""Which checkpoint `checkpoint.resumeFrom` means: of a run by name or folder, by step, and never outside the folders it may lie in."""

import os

import pytest

from rl_core.api.errors import ConfigError, DataError
from rl_core.api.settings import ResumeFromSpec
from rl_core.checkpoint.source import find_source
from rl_core.checkpoint.store import CheckpointStore


def save(folder, *steps, **rewards):
    """Fill the checkpoints of a run; `s3=0.5` is the reward of step 3."""
    store = CheckpointStore(folder, keep=9)
    for step in steps:
        (store.begin(step, 0) / "shard").write_text(str(step))
        reward = rewards.get(f"s{step}")
        store.publish(metrics={} if reward is None else {"reward": reward})


@pytest.fixture
def volume(tmp_path):
    root = tmp_path / "volume"
    save(root / "first-0123abcd/checkpoints", 2, 4, 6, s2=0.1, s4=0.9, s6=0.2)
    (root / "next-89abcdef").mkdir()
    return root


def find(volume, **wanted):
    return find_source(ResumeFromSpec(**wanted), output=volume / "next-89abcdef", bounds=[volume])


@pytest.mark.parametrize(("step", "found"), [("latest", 6), ("best", 4), (2, 2), ("4", 4)])
def test_a_run_is_found_by_its_name_and_the_checkpoint_by_its_step(volume, step, found):
    assert find(volume, job="first", step=step).step == found


@pytest.mark.parametrize(
    ("inner", "found"),
    [("", 6), ("checkpoints", 6), ("checkpoints/step-00000002", 2)],
    ids=["the run's folder", "its checkpoints", "one of them"],
)
def test_a_path_may_name_the_run_or_one_checkpoint(volume, inner, found):
    assert find(volume, path=str(volume / "first-0123abcd" / inner)).step == found


def test_of_two_runs_of_a_name_the_one_that_saved_last_counts(volume):
    save(volume / "first-76543210/checkpoints", 3)
    os.utime(volume / "first-76543210/checkpoints/step-00000003/manifest.json", (1, 1))
    assert find(volume, job="first").step == 6
    os.utime(volume / "first-76543210/checkpoints/step-00000003/manifest.json", (2**32, 2**32))
    assert find(volume, job="first").step == 3


def test_a_job_made_anew_under_its_name_goes_on_from_the_one_before_and_not_from_itself(volume):
    found = find_source(ResumeFromSpec(job="first"), output=volume / "first-89abcdef", bounds=[volume])
    assert found.path == volume / "first-0123abcd/checkpoints/step-00000006"


def test_other_names_that_begin_alike_are_not_meant(volume):
    save(volume / "first-longer/checkpoints", 9)
    assert find(volume, job="first").step == 6


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"job": "second"}, r"holds a complete checkpoint, got second; there are: first-0123abcd\. Name one of them"),
        (
            {"job": "first", "step": 3},
            r"step must be that of a complete checkpoint .* got 3; there are: 2, 4, 6; name one of them",
        ),
        ({"path": "relative"}, "must be absolute"),
        ({"path": "/nowhere/at/all"}, "which is not there; correct it"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_there_is_refused_with_what_is(volume, wanted, told):
    with pytest.raises(ConfigError, match=told):
        find(volume, **wanted)


@pytest.mark.parametrize("way", ["beside", "dots", "link", "inner link"])
def test_a_checkpoint_outside_of_the_volume_is_refused_with_links_followed(volume, tmp_path, way):
    save(tmp_path / "outside/checkpoints", 8)
    path = {"beside": tmp_path / "outside", "dots": volume / "../outside"}.get(way, volume / "link")
    if way == "link":
        path.symlink_to(tmp_path / "outside")
    if way == "inner link":
        path.mkdir()
        (path / "step-00000008").symlink_to(tmp_path / "outside/checkpoints/step-00000008")
    with pytest.raises(ConfigError, match="must lie in .*volume, got .*mount the volume that holds it"):
        find(volume, path=str(path))


def test_best_needs_a_reward(volume):
    save(volume / "plain/checkpoints", 5)
    with pytest.raises(ConfigError, match="complete checkpoint with a reward in .*got best; there are: 5"):
        find(volume, job="plain", step="best")


def test_the_step_of_a_named_checkpoint_is_its_own(volume):
    with pytest.raises(ConfigError, match="step must be 2, .* got 4; leave it out"):
        find(volume, path=str(volume / "first-0123abcd/checkpoints/step-00000002"), step=4)


def test_the_newest_undamaged_one_counts_and_a_damaged_one_that_is_named_is_refused(volume):
    shard = volume / "first-0123abcd/checkpoints/step-00000006/shard"
    shard.write_text("7")
    assert find(volume, job="first").step == 4
    with pytest.raises(DataError, match="is damaged"):
        find(volume, job="first", step=6)


def test_looking_changes_nothing_there(volume):
    for path in sorted((volume / "first-0123abcd").rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(volume.rglob("*"))
    assert find(volume, job="first").step == 6 and sorted(volume.rglob("*")) == before
