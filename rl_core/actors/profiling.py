"""Profiles of training steps (`actor.profileSteps`): what each rank ran on CPU and GPU, as Chrome traces in the output folder."""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

FOLDER = "profiles"
"""Folder of the profiles in the output folder."""


class StepProfiler:
    """Runs torch.profiler over the chosen training steps of a rank. Not thread-safe: a step's methods run on one thread."""

    def __init__(self, steps: Collection[int], *, rank: int, device: torch.device, folder: Path | None = None) -> None:
        """Profile the training steps numbered `steps` on this rank; `device` is the one that it trains on.

        `folder` None means `profiles` in the output folder of the run, and outside of a run in the working directory.
        """
        self._steps, self._rank = frozenset(steps), rank
        self._folder = Path(os.environ.get("RLJOB_OUTPUT", ".")) / FOLDER if folder is None else folder
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._running: profile | None = None

    @contextmanager
    def covering(self, step: int, *, ends_step: bool = False) -> Iterator[None]:
        """Start the profiler before the block, a part of step `step`, if the step is chosen and it is not running.

        It runs on, between blocks too, until the end of a block with `ends_step`, which writes the profile to
        `step-0000003-rank-0.json.gz`. A storage that refuses the file is logged, and the run goes on.
        """
        if step in self._steps and self._running is None:
            self._running = profile(activities=self._activities)
            self._running.start()
        try:
            yield
        finally:
            if ends_step and self._running is not None:
                running, self._running = self._running, None
                running.stop()
                self._write(running, step)

    def _write(self, profiler: profile, step: int) -> None:
        path = self._folder / f"step-{step:07d}-rank-{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            logger.info("the profile of step %s is in %s", step, path)
        except OSError as error:
            logger.warning("step %s has no profile, the storage of %s refuses: %s", step, path, error)
