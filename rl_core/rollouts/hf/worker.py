"""`HFRolloutWorker`: the rollout worker of a job that says `rollout.engine: hf`."""

from __future__ import annotations

from rl_core.rollouts.base import RolloutWorkerBase


class HFRolloutWorker(RolloutWorkerBase):
    """Generates with the HF engine (`hf.served`) and scores with the job's env workers."""
