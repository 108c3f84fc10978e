"""Which metric of validation the commands and the page show for a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rl_core.api.embodied import is_embodied
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob

JUDGES = frozenset({"math", "reasoning_gym", "exact"})
"""Environments and built-in rewards whose reward is 1 exactly for a right answer."""


@dataclass(frozen=True, slots=True)
class ValidationMetric:
    """A metric of validation and the name that the console gives it."""

    key: str
    name: str


ACCURACY = ValidationMetric("val/accuracy", "accuracy")
REWARD = ValidationMetric("val/reward_mean", "reward")
RETURN = ValidationMetric("val/return", "return")


def validation_metric(job: RLJob) -> ValidationMetric:
    """Return what validation of `job` measures: the return of episodes in simulators, accuracy where the environment says what is right,
    else the mean reward.

    Accuracy is the share of samples with a reward of at least 1, which means nothing for a reward function of any other scale.
    """
    if is_embodied(job.spec):
        return RETURN
    env = job.spec.env
    return ACCURACY if env.type in JUDGES or env.reward in JUDGES else REWARD


def stored_validation_metric(document: Mapping[str, Any]) -> ValidationMetric:
    """Return what validation of a stored job measures; accuracy for a job that this version does not understand."""
    fields = {key: document.get(key) for key in ("apiVersion", "kind", "spec")}
    try:
        return validation_metric(RLJob.model_validate(fields | {"metadata": {"name": "stored"}}))
    except (ValidationError, ConfigError):
        return ACCURACY
