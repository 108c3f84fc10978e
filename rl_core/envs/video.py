"""Videos of evaluation episodes: the frames that a simulator renders, and the GIF file of an episode.

`imageio`, of `rljob[video]`, writes the files. The process of the simulator renders, and the env worker writes.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_core.api.errors import ConfigError
from rl_core.api.user_code import describe

FRAMES = 200
"""Frames of the longest video; an episode with more steps is shown faster."""
LONGEST_SIDE = 240
"""Pixels; of larger images only every second, third, ... pixel is kept."""
FRAME_MS = 50


def require_imageio() -> None:
    """Raise ConfigError when the package that writes videos is not installed."""
    if importlib.util.find_spec("imageio") is None:
        raise ConfigError(
            "env.options.videos needs the package imageio, which is not installed; install rljob[video] or set videos to 0"
        )


class Camera:
    """Renders an environment at the beginning of an episode, every few steps, and at its end."""

    def __init__(self, env: Any, every: int) -> None:
        """Render `env` every `every` steps. Raises ConfigError when its `render()` gives no image of [height, width, 3] bytes."""
        self._env, self._interval = env, every
        self._recording, self._steps = False, 0
        env.reset(seed=0)
        self._frame()

    def begin(self, on: bool) -> list[np.ndarray]:
        """Return the frames of the beginning of an episode, none unless it is recorded (`on`)."""
        self._recording, self._steps = on, 0
        return [self._frame()] if on else []

    def after_step(self, *, last: bool) -> list[np.ndarray]:
        """Return the frames that follow a step; `last`: the episode ended with it."""
        self._steps += 1
        return [self._frame()] if self._recording and (last or self._steps % self._interval == 0) else []

    def _frame(self) -> np.ndarray:
        try:
            frame = np.asarray(self._env.render())
        except Exception as error:  # A simulator may raise anything.
            raise ConfigError(
                f"env.options.videos: the simulator could not render: {describe(error)}; install what it needs or set videos to 0"
            ) from error
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise ConfigError(
                "env.options.videos: render() of a simulator must return an image of [height, width, 3] bytes, as with render_mode "
                f"rgb_array, got {frame.dtype} {frame.shape}; correct it or set videos to 0"
            )
        stride = -(-max(frame.shape[:2]) // LONGEST_SIDE)
        return frame[::stride, ::stride].copy()


def gif(frames: Sequence[np.ndarray]) -> bytes:
    """Return a GIF file that shows the images [height, width, 3] one after the other, and begins anew at the end."""
    import imageio.v3

    data: bytes = imageio.v3.imwrite("<bytes>", np.stack(frames), extension=".gif", duration=FRAME_MS, loop=0)
    return data
