"""Routes the lease calls of rollouts to the training prompts or to the open validation round.

Rollouts lease training groups and validation prompts by the same calls. A lease token tells which ledger issued it. The dispatcher is the
only caller and makes one call at a time.
"""

from collections.abc import Sequence

from rl_core.messages.groups import PromptLease, RequeueReason, ValidationScores
from rl_core.messages.samples import KeptSample
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.training_account import TrainingAccount
from rl_core.runner.validation_round import ValidationRound


class Accounts:
    """The lease calls over the training account and over the validation round, if one is open."""

    def __init__(self, training: TrainingAccount) -> None:
        self.training = training
        self.validation: ValidationRound | None = None
        """The open round; its prompts are leased before those of training. None while no validation runs."""

    def has_groups(self, version: int) -> bool:
        """Return whether a lease request for weights of `version` would be answered with at least one prompt group now."""
        validation = self.validation
        return self.training.num_leasable(version) > 0 or (validation is not None and validation.version == version)

    def lease(self, max_groups: int, owner: str, *, served: int, now: float) -> list[PromptLease]:
        """Lease up to `max_groups` prompt groups to the rollout process `owner`.

        `served` is the version of the weights that the rollout has, `now` the runner's clock in seconds. Validation prompts come first.
        """
        leases = self.validation.lease(max_groups, owner, served=served) if self.validation is not None else []
        return leases + self.training.lease(max_groups - len(leases), owner, served=served, now=now)

    def revert_lease(self, lease: PromptLease) -> None:
        """Make a group available again whose lease did not reach its owner; no attempt is counted."""
        if lease.mode == "train":
            self.training.revert_lease(lease)
        elif self.validation is not None:
            self.validation.ledger.revert_lease(lease.token)

    def renew(self, tokens: Sequence[str], owner: str) -> list[str]:
        """Extend the leases of `owner` to their full duration from now; return the tokens of leases that it does not hold (any more)."""
        of_training = [token for token in tokens if self.training.ledger.issued(token)]
        unissued = [token for token in tokens if not self.training.ledger.issued(token)]
        stale = self.training.ledger.renew(of_training, owner)
        return stale + (self.validation.ledger.renew(unissued, owner) if self.validation is not None else unissued)

    def take_scores(self, scores: ValidationScores) -> None:
        """Record the scores of a validation prompt. Scores of an earlier round, or of a lease that is no longer held, are ignored."""
        if self.validation is not None and self.validation.ledger.issued(scores.token):
            self.validation.take(scores)

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
        """Accept a prompt group that `owner` returns unfinished: it is leased again, or dropped once its attempts for `reason` are used up.

        `counted` False uses up no attempt. `failed` is the sample that failed the group. A token that `owner` does not hold is ignored.
        """
        if self.validation is not None and self.validation.ledger.issued(token):
            self.validation.return_group(token, owner, reason, message, counted=counted, failed=failed)
        else:
            self.training.return_group(token, owner, reason, message, counted=counted, failed=failed)

    def owner_lost(self, owner: str, message: str) -> list[str]:
        """Requeue the prompt groups that a lost process held; return the tokens of its leases."""
        tokens = self.training.owner_lost(owner, message)
        return tokens + (self.validation.owner_lost(owner, message) if self.validation is not None else [])

    def expire(self) -> list[str]:
        """Requeue the prompt groups whose leases have expired; return the tokens of these leases."""
        return self.training.expire() + (self.validation.expire() if self.validation is not None else [])

    def extend_leases(self, seconds: float) -> None:
        """Extend every lease by `seconds`, the time for which the runner process was frozen and could not receive renewals."""
        self.training.ledger.extend_leases(seconds)
        if self.validation is not None:
            self.validation.ledger.extend_leases(seconds)

    def held(self) -> list[HeldGroup]:
        """Return the groups that are leased, generated or admitted, each with its owner and the seconds since it is in that state."""
        return self.training.ledger.held() + (self.validation.ledger.held() if self.validation is not None else [])
