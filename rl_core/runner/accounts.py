"""The accounts of all groups that rollouts can hold: those of training, and those of the validation round that is open.

A lease token tells which account it belongs to. The dispatcher is the only caller and serialises the calls.
"""

from collections.abc import Sequence

from rl_core.messages.groups import PromptLease, RequeueReason, ValidationScores
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.training_account import TrainingAccount
from rl_core.runner.validation_round import ValidationRound


class Accounts:
    """The training account and the open validation round, asked as one."""

    def __init__(self, training: TrainingAccount) -> None:
        self.training = training
        self.validation: ValidationRound | None = None
        """The round that is given out, before the groups of training."""

    def has_groups(self, version: int) -> bool:
        """Return whether a rollout that serves `version` may find a group."""
        validation = self.validation
        return self.training.room(version) > 0 or (validation is not None and validation.version == version)

    def lease(self, want: int, owner: str, *, served: int, now: float) -> list[PromptLease]:
        """Return up to `want` groups for the rollout `owner`, which serves version `served`."""
        leases = self.validation.lease(want, owner, served=served) if self.validation is not None else []
        return leases + self.training.lease(want - len(leases), owner, served=served, now=now)

    def undo(self, lease: PromptLease) -> None:
        """Take back a lease that did not reach its owner."""
        if lease.mode == "train":
            self.training.undo(lease)
        elif self.validation is not None:
            self.validation.ledger.undo(lease.token)

    def renew(self, tokens: Sequence[str], owner: str) -> list[str]:
        """Let the leases of `owner` run anew; return the tokens that are not its current leases."""
        of_training = [token for token in tokens if self.training.ledger.gave(token)]
        others = [token for token in tokens if not self.training.ledger.gave(token)]
        stale = self.training.ledger.renew(of_training, owner)
        return stale + (self.validation.ledger.renew(others, owner) if self.validation is not None else others)

    def take_scores(self, scores: ValidationScores) -> None:
        """Count the scores of a validation prompt; those of an earlier round or of a lost lease change nothing."""
        if self.validation is not None and self.validation.ledger.gave(scores.token):
            self.validation.take(scores)

    def give_back(self, token: str, owner: str, reason: RequeueReason, message: str, *, counted: bool = True) -> None:
        """Take back a group that `owner` cannot finish."""
        if self.validation is not None and self.validation.ledger.gave(token):
            self.validation.give_back(token, owner, reason, message, counted=counted)
        else:
            self.training.give_back(token, owner, reason, message, counted=counted)

    def owner_lost(self, owner: str, message: str) -> list[str]:
        """Take back what a lost process held; return the tokens of its leases."""
        tokens = self.training.owner_lost(owner, message)
        return tokens + (self.validation.owner_lost(owner, message) if self.validation is not None else [])

    def expire(self) -> list[str]:
        """Take back groups whose leases were not renewed; return the tokens of the leases."""
        return self.training.expire() + (self.validation.expire() if self.validation is not None else [])

    def extend_leases(self, seconds: float) -> None:
        """Let every lease run longer by the time in which this process stood still."""
        self.training.ledger.extend_leases(seconds)
        if self.validation is not None:
            self.validation.ledger.extend_leases(seconds)

    def held(self) -> list[HeldGroup]:
        """Return who holds which group since when."""
        return self.training.ledger.held() + (self.validation.ledger.held() if self.validation is not None else [])
