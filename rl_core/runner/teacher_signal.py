"""Ends a run that cannot learn anything: no sample has a reward, or the teacher's log-probabilities equal those of the student."""

from collections.abc import Mapping

from rl_core.api.errors import ConfigError

TEACHER_SHARE = "train/distill/teacher_share"
REWARD, UNREWARDED = "reward/mean", "reward/missing"
MOST_SILENT_STEPS = 3


class TeacherSignal:
    """Counts consecutive steps in which the teacher's share of the advantages is 0."""

    def __init__(self) -> None:
        self._silent_steps = 0

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Raises ConfigError at the third consecutive step in which the teacher's share is 0."""
        share = metrics.get(TEACHER_SHARE)
        self._silent_steps = self._silent_steps + 1 if share == 0.0 else 0
        if self._silent_steps >= MOST_SILENT_STEPS:
            raise ConfigError(
                f"{TEACHER_SHARE} must be above 0, got 0 for {self._silent_steps} steps: the teacher gives each token the log-probability of the "
                "student; check the model of the teacher's group"
            )


class RewardSignal:
    """Counts consecutive steps in which no sample has a reward."""

    def __init__(self) -> None:
        self._silent_steps = 0

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Raises ConfigError at the third consecutive step in which samples were scored and none has a reward.

        Steps with a teacher train without rewards and are not counted.
        """
        unrewarded = metrics.get(UNREWARDED, 0.0) > 0 and not {REWARD, TEACHER_SHARE} & metrics.keys()
        self._silent_steps = self._silent_steps + 1 if unrewarded else 0
        if self._silent_steps >= MOST_SILENT_STEPS:
            raise ConfigError(
                f"env must give a reward to some sample of a step, got None for all samples of {self._silent_steps} steps, so nothing is trained; "
                "is a `return` missing in the code that scores?"
            )
