"""Ends a run of on-policy distillation in which the teacher changes nothing."""

from collections.abc import Mapping

from rl_core.api.errors import ConfigError

TEACHER_SHARE = "train/distill/teacher_share"
MOST_SILENT_STEPS = 3


class TeacherSignal:
    """Counts consecutive steps in which the teacher's share of the advantages is 0."""

    def __init__(self) -> None:
        self._silent = 0

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step. Raises ConfigError at the third step in a row without a signal of the teacher."""
        share = metrics.get(TEACHER_SHARE)
        self._silent = self._silent + 1 if share == 0.0 else 0
        if self._silent >= MOST_SILENT_STEPS:
            raise ConfigError(
                f"{TEACHER_SHARE} must be above 0, got 0 for {self._silent} steps: the teacher gives each token the log-probability of the "
                "student; check the model of the teacher's group"
            )
