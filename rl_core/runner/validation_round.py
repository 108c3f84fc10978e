"""One pass over the validation prompts at one policy version: the leases of its prompts, and the scores so far."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rl_core.api.records import DatumSpec
from rl_core.messages.groups import PromptLease, RequeueReason, ValidationScores
from rl_core.messages.samples import KeptSample
from rl_core.runner.ledger import PromptLedger

if TYPE_CHECKING:
    from rl_core.api.settings import ValidationSpec


class ValidationRound:
    """A ledger of the validation prompts and their scores. The dispatcher serialises the calls."""

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
        """Validate policy `version` with `samples`. `number` distinguishes the rounds of a run in their group ids.

        `attempts` is the number of attempts of a prompt by requeue reason. A prompt that uses them up counts as an error, not as a wrong
        answer. A lease ends `lease_seconds` after it was granted or last renewed.
        """
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
        self.failed: list[KeptSample] = []
        """The samples that failed these prompts, as far as they are known."""

    def lease(self, max_groups: int, owner: str, *, served: int) -> list[PromptLease]:
        """Lease up to `max_groups` prompts to `owner`; none unless its weights version `served` is that of the round."""
        if served != self.version:
            return []
        settings = self._settings
        return [
            lease.message("validate", num_generations=settings.samples_per_prompt, temperature=settings.temperature)
            for lease in self.ledger.lease(max_groups, owner, policy_version=self.version)
        ]

    def take(self, scores: ValidationScores) -> None:
        """Record the scores of a prompt. Scores of a lease that is not the current one are ignored."""
        if self.ledger.finish(scores.token) is not None:
            self.ledger.discard([scores.group_id], "scored")
            self.scores[scores.group_id] = scores

    def return_group(
        self,
        token: str,
        owner: str,
        reason: RequeueReason,
        message: str,
        *,
        counted: bool = True,
        failed: KeptSample | None = None,
    ) -> None:
        """Accept a prompt that `owner` returns unfinished: it is leased again, or counts as an error once its attempts are used up.

        The sample that `failed` such a prompt is remembered.
        """
        group = self.ledger.group_by_token(token)
        if group is not None and group.owner == owner:
            requeued = self.ledger.requeue(token, reason, message, counted=counted)
            if not requeued and failed is not None:
                self.failed.append(failed)
            self._note_drops()

    def owner_lost(self, owner: str, message: str) -> list[str]:
        """Requeue the prompts that a lost process held; return the tokens of its leases."""
        tokens = self.ledger.requeue_owner(owner, "worker_lost", message)
        self._note_drops()
        return tokens

    def expire(self) -> list[str]:
        """Requeue the prompts whose leases have expired; return the tokens of these leases."""
        tokens = self.ledger.expire()
        self._note_drops()
        return tokens

    def _note_drops(self) -> None:
        self.failures |= {drop.group_id: drop.message or drop.reason for drop in self.ledger.take_drops()}
