"""Measures the served weights on the validation split: same rollouts, same environments, no training record."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rl_core.api.errors import ChannelEmpty, ConfigError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.api.records import DatumSpec
from rl_core.channel import Channel
from rl_core.messages.groups import PromptLease, RequeueReason, ValidationScores
from rl_core.runner.ledger import HeldGroup, PromptLedger

if TYPE_CHECKING:
    from rl_core.api.settings import ValidationSpec

logger = logging.getLogger(__name__)
SOLVED = 1.0 - 1e-6
"""A sample counts as accurate when its reward reaches 1."""
LOOK = 1.0
"""Seconds between two looks at whether to go on waiting for scores."""


class ValidationRound:
    """One pass over the validation prompts at one policy version. Its only caller is the dispatcher, which serialises calls."""

    def __init__(
        self,
        number: int,
        version: int,
        samples: Sequence[DatumSpec],
        settings: "ValidationSpec",
        *,
        attempts: dict[str, int],
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attempts` of a prompt by reason; one that uses them up counts as an error, not as a wrong answer."""
        self.version = version
        self.ledger = PromptLedger(
            samples,
            seed=0,
            shuffle=False,
            lease_seconds=lease_seconds,
            max_attempts=attempts,
            clock=clock,
            data_epochs=1,
            prefix=f"val{number}-",
        )
        self._settings, self._lease_seconds = settings, lease_seconds
        self.scores: dict[str, ValidationScores] = {}
        """What came, by group id."""
        self.failures: dict[str, str] = {}
        """Why a prompt has no scores, by group id."""

    def lease(self, want: int, owner: str, *, served: int) -> list[PromptLease]:
        """Return up to `want` prompts for a rollout that serves `served`."""
        if served != self.version:
            return []
        return [
            PromptLease(
                mode="validate",
                group_id=lease.group_id,
                token=lease.token,
                sample=lease.sample,
                num_generations=self._settings.samples_per_prompt,
                attempt=lease.seed_attempt,
                policy_version=self.version,
                temperature=self._settings.temperature,
                lease_seconds=self._lease_seconds,
            )
            for lease in self.ledger.lease(want, owner)
        ]

    def undo(self, lease: PromptLease) -> None:
        """Take back a lease that did not reach its owner."""
        self.ledger.undo(lease.token)

    def gave(self, token: str) -> bool:
        """Return whether a token is of this round."""
        return self.ledger.gave(token)

    def renew(self, tokens: Sequence[str], owner: str) -> list[str]:
        """Let leases run on; return those that are not current."""
        return self.ledger.renew(tokens, owner)

    def take(self, scores: ValidationScores) -> None:
        """Take what a rollout scored; only what carries the prompt's current token counts."""
        if self.ledger.complete(scores.token, None):
            self.ledger.discard([scores.group_id], "scored")
            self.scores[scores.group_id] = scores

    def give_back(self, token: str, reason: RequeueReason, message: str) -> None:
        """Take back a prompt: given out again, or counted as an error."""
        try:
            self.ledger.requeue(token, reason, message)
        except ValueError as error:
            logger.warning("validation: %s", error)
        self._note_drops()

    def owner_lost(self, owner: str) -> list[str]:
        """Give out again what a lost member held; return the group ids."""
        again = self.ledger.requeue_owner(owner, "worker_lost", f"{owner} was lost")
        self._note_drops()
        return again

    def expire(self) -> list[str]:
        """Give out again what was not renewed; return the group ids."""
        late = self.ledger.expire()
        self._note_drops()
        return late

    def held(self) -> list[HeldGroup]:
        """Return who holds which prompt since when."""
        return self.ledger.held()

    def _note_drops(self) -> None:
        self.failures |= {drop.group_id: drop.message or drop.reason for drop in self.ledger.take_drops()}


class RoundDesk(Protocol):
    """Gives the prompts of a round out. Implemented by `Dispatcher`."""

    def open_validation(self, validation: ValidationRound) -> None:
        """Give them out from here on."""
        ...

    def take_scores(self, scores: ValidationScores) -> None:
        """Count the answer of a prompt, unless it is of a round or a lease of the past."""
        ...

    def close_validation(self) -> None:
        """Give out no more of them."""
        ...


class Validation:
    """Has every validation prompt answered and collects the scores."""

    def __init__(
        self,
        spec: RLJobSpec,
        samples: Sequence[DatumSpec],
        *,
        desk: RoundDesk,
        results: Channel,
        attempts: dict[str, int],
    ) -> None:
        """Measure `samples`; `results` brings ValidationScores. Raises ConfigError when there are no samples."""
        if not samples:
            raise ConfigError("data.validation must hold at least one prompt, got none; fill it or remove it")
        self._spec = spec
        self._samples = samples[: spec.validation.max_prompts] if spec.validation.max_prompts else samples
        self._desk, self._results, self._attempts = desk, results, attempts
        self._rounds = 0

    def measure(
        self,
        version: int,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        short: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Return `val/*` of policy `version`; every prompt answers or is counted as an error.

        While `short()` nobody can answer, and the time does not count. Raises DeadlineExceeded naming how many answers are missing.
        """
        self._rounds += 1
        validation = ValidationRound(
            self._rounds,
            version,
            self._samples,
            self._spec.validation,
            attempts=self._attempts,
            lease_seconds=self._spec.runtime.lease_seconds,
        )
        self._desk.open_validation(validation)
        try:
            self._collect(validation, cancelled, short)
        finally:
            self._desk.close_validation()
        for group_id, message in validation.failures.items():
            logger.warning("validation prompt %s: %s", group_id, message)
        return summarise(
            list(validation.scores.values()),
            errors=len(validation.failures),
            group_size=self._spec.validation.samples_per_prompt,
        )

    def _collect(self, validation: ValidationRound, cancelled: Callable[[], bool], short: Callable[[], bool]) -> None:
        began, limit = time.monotonic(), self._spec.runtime.deadlines.rollout
        while not cancelled():
            answered = len(validation.scores) + len(validation.failures)
            if answered == len(self._samples):
                return
            if short():
                began = max(began, time.monotonic() - limit / 2)
            elif time.monotonic() - began > limit:
                raise DeadlineExceeded(
                    f"validation of version {validation.version} must finish in {limit:.0f} s, got {answered} of {len(self._samples)} answers"
                )
            try:
                self._desk.take_scores(self._results.get(timeout=LOOK))
            except (DeadlineExceeded, ChannelEmpty):
                continue


def summarise(scores: Sequence[ValidationScores], *, errors: int, group_size: int) -> dict[str, float]:
    """Return `val/*` over finished prompts; `errors` is the number of those that failed, which count for nothing else.

    A sample without a reward (None) is no wrong one: it leaves accuracy, a prompt without any other leaves pass@k too.
    """
    metrics = {"val/errors": float(errors), "val/prompts": float(len(scores) + errors)}
    by_prompt = [[r for r in one.rewards if r is not None and np.isfinite(r)] for one in scores]
    rewards = [reward for prompt in by_prompt for reward in prompt]
    if not rewards:
        return metrics
    solved_by_prompt = [max(prompt) >= SOLVED for prompt in by_prompt if prompt]
    return metrics | {
        "val/accuracy": float(np.mean([reward >= SOLVED for reward in rewards])),
        "val/reward_mean": float(np.mean(rewards)),
        "val/response_length_mean": float(np.mean([length for one in scores for length in one.lengths])),
        "val/truncation_rate": float(np.mean([cut for one in scores for cut in one.truncated])),
        f"val/pass@{group_size}": float(np.mean(solved_by_prompt)),
    }
