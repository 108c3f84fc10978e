"""Which groups may be given out and which may train, by policy version (protocol.md 2). Pure; one object decides both questions.

`OnPolicy` is the policy of `ReasoningRunner`. A bounded asynchronous program brings one of its own; nobody else compares versions.
"""

from typing import Protocol

from rl_core.messages.groups import GroupEntry


class Admission(Protocol):
    """Decides for the open step. Implemented by `OnPolicy`."""

    def room(self, *, target: int, admitted: int, out: int) -> int:
        """Return how many more groups may be given out now.

        `target`: groups the step trains; `admitted`: those it holds; `out`: those that are with rollouts or on their way back.
        """
        ...

    def may_generate(self, *, served: int, version: int) -> bool:
        """Return whether a rollout that serves version `served` may be given a group while the trainer is at `version`."""
        ...

    def may_train(self, entry: GroupEntry, *, version: int) -> bool:
        """Return whether a finished group may be trained on weights of `version`."""
        ...


class OnPolicy:
    """Every token of a step comes from the weights that the step trains."""

    def room(self, *, target: int, admitted: int, out: int) -> int:
        """Return what the step lacks: no group runs ahead for a later one."""
        return target - admitted - out

    def may_generate(self, *, served: int, version: int) -> bool:
        """Return whether the versions are equal."""
        return served == version

    def may_train(self, entry: GroupEntry, *, version: int) -> bool:
        """Return whether all tokens are of `version`."""
        return entry.v_min == entry.v_max == version
