"""Videos of evaluation episodes: the images that a simulator renders arrive in the output folder's format and in TensorBoard."""

import asyncio
import importlib.util
import io

import imageio.v3
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_core.api.errors import ConfigError
from rl_core.envs.worker import EnvWorker
from rl_core.messages.embodied import CollectionRequest
from rl_core.observability.trackers import TensorBoardTracker, Trackers
from tests.unit.embodied.test_collection import World, job
from tests.unit.embodied.workers import workers


async def evaluated(world, episodes):
    observations, actions, _ = world.channels
    ranks = {"envs": tuple(range(len(world.envs))), "rollouts": tuple(range(len(world.rollouts)))}
    request = CollectionRequest(number=1, step=1, mode="eval", episodes=episodes, **ranks)
    answers = await asyncio.gather(
        *(env.interact(actions, observations, request) for env in world.envs),
        *(rollout.evaluate(observations, actions, request) for rollout in world.rollouts),
    )
    return answers[: len(world.envs)]


def test_the_first_env_worker_keeps_the_frames_of_its_first_episodes(tmp_path):
    world = World(2, 1, 1, videos=2, evalHorizon=600, evalEpisodes=6)
    stats = asyncio.run(evaluated(world, 6))
    assert [len(one.videos) for one in stats] == [2, 0]
    assert [len(one.episodes) for one in stats] == [3, 3]
    for episode, video in zip(sorted(stats[0].episodes, key=lambda one: one["slot"]), stats[0].videos, strict=False):
        frames = imageio.v3.imread(video, extension=".gif", index=None)
        # A frame of the beginning, one every third step, and one of the end; images are thinned to at most 240 pixels.
        steps = sorted({0, *range(3, episode["length"] + 1, 3), episode["length"]})
        assert frames.shape == (len(steps), 150, 240, 3)
        assert frames[:, 0, 0, 0].tolist() == [20 * step for step in steps]
    trackers = Trackers([TensorBoardTracker(tmp_path)])
    trackers.log_videos(7, stats[0].videos)
    trackers.finish("Finished")
    read = EventAccumulator(str(tmp_path)).Reload()
    assert read.Tags()["images"] == ["val/episode_0", "val/episode_1"]
    (image,) = read.Images("val/episode_1")
    assert (image.step, image.width, image.height) == (7, 240, 150)
    assert Image.open(io.BytesIO(image.encoded_image_string)).format == "GIF"


def test_training_and_evaluation_without_videos_render_nothing():
    world = World(1, 1, 1)
    (stats,) = asyncio.run(evaluated(world, 4))
    assert stats.videos == [] and len(stats.episodes) == 4


def test_videos_that_cannot_be_made_are_refused_before_the_run(monkeypatch):
    kwargs = {"id": "tests.unit.embodied.simulators:Scripted", "videos": 1}
    monkeypatch.setattr("tests.unit.embodied.simulators.Scripted.render", lambda self: np.zeros((4, 4)))
    with pytest.raises(ConfigError, match=r"render\(\) of a simulator must return an image .*, got float64 \(4, 4\)"):
        workers(EnvWorker, "env", 1, job(1, 1, 1, **kwargs))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "imageio" else found(name))
    with pytest.raises(ConfigError, match=r"needs the package imageio, which is not installed; install rljob\[video\]"):
        workers(EnvWorker, "env", 1, job(1, 1, 1, **kwargs))
