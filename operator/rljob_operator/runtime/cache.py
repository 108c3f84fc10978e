"""The operator's own view of the cluster: trimmed objects by kind, namespace and job.

It is filled by kopf's watch events, by the operator's lists, and by the answers to its own writes, so that it reads its own writes. The
newest resourceVersion is kept, from any source; versions of one cluster are compared as numbers. An object that is known to be deleted is
not added again with the same uid. A list removes the objects that it does not contain, unless they were added after the list began. That is
needed because kopf reports no deletion that happened in a gap of its watch.

A restore of etcd from a backup sets versions back and brings deleted objects back. Reads and lists are consistent: what the cache held before
a read began is never newer than its answer. Such an answer (`read_at`) therefore counts, whatever its version.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_operator.kinds import OWNED, POD, RLJOB, Kind
from rljob_operator.manifests import network
from rljob_operator.naming import LABEL_JOB

GRAVES = 20_000
"""Number of uids of deleted objects that are remembered."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """The namespace and name of a job: the key of queue and cache."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of the cache."""

    uid: str
    version: int
    value: Any
    """The trimmed object, or what the kind's projection made of it."""
    since: float
    """Time at which this version was added, on the cache's clock in seconds."""


Projection = Callable[[Mapping[str, Any]], Any]


def job_key(kind: Kind, obj: Mapping[str, Any]) -> JobKey | None:
    """Return the job of an object, by its label, or by its name for a job; None for an object without the label."""
    meta = obj["metadata"]
    name = meta["name"] if kind == RLJOB else (meta.get("labels") or {}).get(LABEL_JOB)
    return JobKey(meta["namespace"], name) if name else None


def trim(obj: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object without large fields that nothing reads: managedFields and the last applied configuration."""
    meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    if annotations := meta.get("annotations"):
        meta["annotations"] = {
            key: value for key, value in annotations.items() if not key.startswith("kubectl.kubernetes.io/")
        }
    return {**obj, "metadata": meta}


def head(obj: Mapping[str, Any]) -> dict[str, Any]:
    """Return apiVersion, kind and metadata only: enough for objects judged by their manifest hash."""
    return {key: value for key, value in trim(obj).items() if key in ("apiVersion", "kind", "metadata")}


def policy(obj: Mapping[str, Any]) -> dict[str, Any]:
    """Return `head` of a network policy and the digest of its rules, by which an edit by another client is noticed."""
    return {**head(obj), network.DIGEST: network.digest_of(obj)}


class Cache:
    """Jobs and the objects that belong to them. All methods are synchronous and do no I/O."""

    def __init__(
        self,
        *,
        projections: Mapping[Kind, Projection] | None = None,  # None = every kind as trimmed objects
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._project = projections or {}
        self._clock = clock
        self._entries: dict[Kind, dict[JobKey, dict[str, Entry]]] = {kind: {} for kind in (RLJOB, *OWNED)}
        """kind -> job -> object name -> entry."""
        self._deleted_uids: OrderedDict[str, float] = OrderedDict()
        """uids of deleted objects, and when the deletion became known, on the cache's clock in seconds."""
        self._jobs: dict[str, JobKey] = {}
        """uid -> job, of the jobs held."""

    def put(self, kind: Kind, obj: Mapping[str, Any], *, read_at: float | None = None) -> JobKey | None:
        """Add an object or update it; return its job if the cache has changed, else None.

        `read_at` is the time, on the cache's clock, at which the consistent read or list began that gave the object. None means that the
        object is from an event or from the answer to a write; then only a higher version counts.
        """
        key = job_key(kind, obj)
        meta = obj["metadata"]
        if key is None or self._buried_after(meta["uid"], read_at):
            return None
        entries = self._entries.setdefault(kind, {}).setdefault(key, {})
        cached = entries.get(meta["name"])
        version = int(meta["resourceVersion"])
        older = cached is not None and version <= cached.version
        if cached is not None and older and (version == cached.version or read_at is None or cached.since >= read_at):
            return None
        self._deleted_uids.pop(meta["uid"], None)
        project: Projection = self._project.get(kind, trim)
        value = project(obj)
        entries[meta["name"]] = Entry(meta["uid"], version, value, self._clock())
        if kind == RLJOB:
            if cached is not None:
                self._jobs.pop(cached.uid, None)
            self._jobs[meta["uid"]] = key
        return key if cached is None or cached.value != value or cached.uid != meta["uid"] else None

    def drop(self, kind: Kind, obj: Mapping[str, Any]) -> JobKey | None:
        """Remove an object that is known to be deleted; return its job if the cache had it."""
        key = job_key(kind, obj)
        return self.drop_uid(kind, key, obj["metadata"]["name"], obj["metadata"]["uid"]) if key is not None else None

    def drop_uid(self, kind: Kind, key: JobKey, name: str, uid: str) -> JobKey | None:
        """Remove the object with this uid; another object of the same name stays."""
        self._bury(uid)
        jobs = self._entries.get(kind, {})
        entry = jobs.get(key, {}).get(name)
        if entry is None or entry.uid != uid:
            return None
        del jobs[key][name]
        self._jobs.pop(uid, None)
        if not jobs[key]:
            del jobs[key]
        return key

    def sweep(
        self, kind: Kind, *, alive: set[str], began: float, within: Callable[[JobKey], bool] = lambda key: True
    ) -> set[JobKey]:
        """Drop the objects of a kind whose uid a list that began at `began` did not name; return the jobs that lost some.

        Objects that came in after the list began stay: the list may be older than they are. `within` says which jobs it covered.
        """
        absent = [
            (key, name, entry.uid)
            for key, entries in self._entries.get(kind, {}).items()
            if within(key)
            for name, entry in entries.items()
            if entry.uid not in alive and entry.since < began
        ]
        return {key for key, name, uid in absent if self.drop_uid(kind, key, name, uid) is not None}

    def job(self, key: JobKey) -> Mapping[str, Any] | None:
        """Return the job's object, None when there is none."""
        entry = self._entries[RLJOB].get(key, {}).get(key.name)
        return entry.value if entry is not None else None

    def job_of(self, uid: str) -> Mapping[str, Any] | None:
        """Return the job's object by its uid, None when there is none."""
        key = self._jobs.get(uid)
        return self.job(key) if key is not None else None

    def children(self, kind: Kind, key: JobKey) -> list[Any]:
        """Return the projected objects of one kind with the job's label, by name."""
        return [entry.value for _, entry in sorted(self._entries.get(kind, {}).get(key, {}).items())]

    def support(self, key: JobKey) -> list[Any]:
        """Return the projected objects of all kinds that are neither jobs nor pods, by kind and name."""
        return [obj for kind in self._entries if kind not in (RLJOB, POD) for obj in self.children(kind, key)]

    def holds(self, key: JobKey, kind: str, name: str) -> bool:
        """Return whether an object of that kind (by its name, as `Pod`) is held for the job."""
        return any(name in jobs.get(key, {}) for stored_kind, jobs in self._entries.items() if stored_kind.kind == kind)

    def entry(self, kind: Kind, key: JobKey, name: str) -> Entry | None:
        """Return one object's entry."""
        return self._entries.get(kind, {}).get(key, {}).get(name)

    def jobs(self) -> Iterator[JobKey]:
        """Yield the keys of all jobs."""
        return iter(list(self._entries[RLJOB]))

    def sizes(self) -> dict[str, int]:
        """Return how many objects of each kind are held, by plural name."""
        return {kind.plural: sum(len(names) for names in jobs.values()) for kind, jobs in self._entries.items()}

    def now(self) -> float:
        """Return the cache's clock, for `sweep`."""
        return self._clock()

    def kinds(self) -> Iterable[Kind]:
        """Return the kinds held."""
        return self._entries.keys()

    def _buried_after(self, uid: str, read_at: float | None) -> bool:
        """Return whether an object is known to be deleted, by something that is not older than a read which began at `read_at`."""
        gone_at = self._deleted_uids.get(uid)
        return gone_at is not None and (read_at is None or gone_at >= read_at)

    def _bury(self, uid: str) -> None:
        self._deleted_uids[uid] = self._clock()
        while len(self._deleted_uids) > GRAVES:
            self._deleted_uids.popitem(last=False)
