"""Which of the wanted pods are there, serve, wait or are refused; and how messages name them."""

from __future__ import annotations

from collections.abc import Iterable

from rl_core.plan.failure_rules import Ends
from rljob_operator.model import PodView
from rljob_operator.reconcile.record import GANG, Record
from rljob_operator.reconcile.situation import ROLES, Situation, is_active

NAMED = 5
"""Pods or texts named in a message; the rest is counted."""


def wanted_pods(situation: Situation) -> list[PodView]:
    """Return the wanted pods that are there to stay, by role and index; of the actor those of this epoch."""
    return [
        pod
        for role in ROLES
        for pod in situation.pods_of(role)
        if pod.index in situation.indices(role) and is_active(pod)
    ]


def absent_pods(situation: Situation) -> list[str]:
    """Return the names of the other wanted pods."""
    present = {pod.name for pod in wanted_pods(situation)}
    return [name for role in ROLES for name in situation.wanted(role) if name not in present]


def ready_pods(situation: Situation, role: str) -> int:
    """Return how many wanted pods of a role serve."""
    return sum(1 for pod in wanted_pods(situation) if pod.role == role and pod.ready)


def backing_off(situation: Situation, record: Record, absent: Iterable[str]) -> list[str]:
    """Return those of the `absent` pods whose back-off is not over."""
    gang = set(situation.wanted("actor"))
    return [
        name for name in absent if situation.now < (record.ends.get(GANG if name in gang else name) or Ends()).retry_at
    ]


def refusals(situation: Situation, absent: Iterable[str]) -> str:
    """Return the API server's words about absent pods and support objects it refused; empty when it refused none."""
    pods = {f"Pod/{name}" for name in absent}
    refused = situation.observed.refusals.items()
    return grouped((words, label) for label, words in refused if not label.startswith("Pod/") or label in pods)


def grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Return `names: words` of (words, name) pairs, once for each distinct text; a long list is cut."""
    by_words: dict[str, list[str]] = {}
    for words, name in pairs:
        by_words.setdefault(words, []).append(name)
    texts = [f"{listed(names)}: {words}" for words, names in sorted(by_words.items(), key=lambda item: item[1])]
    return "; ".join(texts[:NAMED]) + (f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else "")


def listed(names: Iterable[str]) -> str:
    """Return names with commas; a long list is cut."""
    all_names = list(names)
    rest = len(all_names) - NAMED
    return ", ".join(all_names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
