"""Lists of the pods that a job should have, by their state (existing, ready, in back-off, refused), and text about them for messages."""

from __future__ import annotations

from collections.abc import Iterable

from rl_core.plan.failure_rules import PodFailures
from rljob_operator.model import PodView
from rljob_operator.reconcile.job_view import JobView, is_active
from rljob_operator.reconcile.record import GANG, Record

NAMED = 5
"""Pods or texts named in a message; the rest is counted."""


def wanted_pods(view: JobView) -> list[PodView]:
    """Return the wanted pods that exist and are neither ended nor being deleted, by group and index; for a gang, of the current epoch."""
    return [pod for pod in view.pods_of(*view.groups) if pod.index in view.wanted_indices(pod.role) and is_active(pod)]


def absent_pods(view: JobView) -> list[str]:
    """Return the names of the wanted pods that are not in `wanted_pods`."""
    present = {pod.name for pod in wanted_pods(view)}
    return [name for name in view.wanted_pod_names(*view.groups) if name not in present]


def ready_pods(view: JobView, group: str) -> int:
    """Return how many wanted pods of a group are ready."""
    return sum(1 for pod in wanted_pods(view) if pod.role == group and pod.ready)


def backing_off(view: JobView, record: Record, absent: Iterable[str]) -> list[str]:
    """Return those of the `absent` pods whose back-off is not over."""
    gang = set(view.wanted_pod_names(*view.gangs))
    return [
        name
        for name in absent
        if view.now < (record.pod_failures.get(GANG if name in gang else name) or PodFailures()).retry_at
    ]


def refusals(view: JobView, absent: Iterable[str]) -> str:
    """Return the API server's messages about refused pods and supporting objects; empty when it refused none."""
    pods = {f"Pod/{name}" for name in absent}
    refused = view.observed.refusals.items()
    return grouped((message, label) for label, message in refused if not label.startswith("Pod/") or label in pods)


def grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Return "name, name: message; ..." for (message, name) pairs, each message once; a long list is cut."""
    by_words: dict[str, list[str]] = {}
    for text, name in pairs:
        by_words.setdefault(text, []).append(name)
    texts = [f"{listed(names)}: {text}" for text, names in sorted(by_words.items(), key=lambda item: item[1])]
    return "; ".join(texts[:NAMED]) + (f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else "")


def listed(names: Iterable[str]) -> str:
    """Return names with commas; a long list is cut."""
    all_names = list(names)
    num_omitted = len(all_names) - NAMED
    return ", ".join(all_names[:NAMED]) + (f" and {num_omitted} more" if num_omitted > 0 else "")
