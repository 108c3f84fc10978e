"""One pass over the validation prompts at one policy version: what rollouts hold of it, and the scores that came."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rl_core.api.records import DatumSpec
from rl_core.messages.groups import PromptLease, RequeueReason, ValidationScores
from rl_core.runner.ledger import PromptLedger

if TYPE_CHECKING:
    from rl_core.api.settings import ValidationSpec


class ValidationRound:
    """A ledger of the validation prompts, each given out once, and their scores. The dispatcher serialises calls."""

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
        """`attempts` of a prompt by reason; a prompt that uses them up counts as an error, not as a wrong answer."""
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
        self._settings = settings
        self.scores: dict[str, ValidationScores] = {}
        """The scores so far, by group id."""
        self.failures: dict[str, str] = {}
        """Why a prompt has no scores, by group id."""

    def lease(self, want: int, owner: str, *, served: int) -> list[PromptLease]:
        """Return up to `want` prompts for a rollout that serves `served`; none for another version than the round's."""
        if served != self.version:
            return []
        settings = self._settings
        return [
            lease.message("validate", num_generations=settings.samples_per_prompt, temperature=settings.temperature)
            for lease in self.ledger.lease(want, owner, policy_version=self.version)
        ]

    def take(self, scores: ValidationScores) -> None:
        """Take the scores of a prompt; those of a lease that is not the current one are passed over."""
        if self.ledger.finish(scores.token) is not None:
            self.ledger.discard([scores.group_id], "scored")
            self.scores[scores.group_id] = scores

    def give_back(self, token: str, owner: str, reason: RequeueReason, message: str, *, counted: bool = True) -> None:
        """Take back a prompt that `owner` holds: given out again, or counted as an error when its attempts are used up."""
        group = self.ledger.current(token)
        if group is not None and group.owner == owner:
            self.ledger.requeue(token, reason, message, counted=counted)
            self._note_drops()

    def owner_lost(self, owner: str, message: str) -> list[str]:
        """Take back what a lost process held; return the tokens of its leases."""
        tokens = self.ledger.requeue_owner(owner, "worker_lost", message)
        self._note_drops()
        return tokens

    def expire(self) -> list[str]:
        """Take back prompts whose leases were not renewed; return the tokens of the leases."""
        tokens = self.ledger.expire()
        self._note_drops()
        return tokens

    def _note_drops(self) -> None:
        self.failures |= {drop.group_id: drop.message or drop.reason for drop in self.ledger.take_drops()}
