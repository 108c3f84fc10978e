"""`HFRolloutWorker`: the rollout worker of a job with `rollout.engine: hf`."""

from __future__ import annotations

from rl_core.rollouts.base import RolloutWorkerBase
from rl_core.rollouts.hf.rollout_engine import HFRolloutEngine


class HFRolloutWorker(RolloutWorkerBase):
    """Generates with the HF engine, in the worker's process, and scores with the job's env workers."""

    build_engine = HFRolloutEngine.build
