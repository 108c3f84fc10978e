"""The defaults of jobs that another version of the operator accepted, read from their ConfigMaps when they are needed first.

Jobs that were accepted with the same schema share one table, so an upgrade costs one read for all of them. A table is used only if its
digest equals the version in the job's status: users of a namespace may edit ConfigMaps, but only the operator writes the status.
"""

from __future__ import annotations

from rl_core.api import defaults
from rl_core.api.defaults import Defaults
from rljob_operator import kinds, naming
from rljob_operator.errors import NotFound
from rljob_operator.manifests.config import DEFAULTS_KEY
from rljob_operator.model import Object
from rljob_operator.runtime.cache import JobKey
from rljob_operator.runtime.cluster import Cluster


class KeptDefaults:
    """The tables by schema version."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        present = defaults.present()
        self._by_version: dict[str, Defaults] = {present.version: present}

    async def of(self, key: JobKey, job: Object) -> Defaults | None:
        """Return the defaults that the job was accepted with; None if it is not accepted yet, or its ConfigMap has no valid table."""
        version = str((job.get("status") or {}).get("schemaVersion") or "")
        if version and version not in self._by_version:
            text = await self._read(key)
            if defaults.version_of(text) != version:
                return None
            self._by_version[version] = defaults.read(text)
        return self._by_version.get(version)

    async def _read(self, key: JobKey) -> str:
        try:
            config_map = await self._cluster.read(kinds.CONFIG_MAP, key.namespace, naming.config_map(key.name))
        except NotFound:
            return ""
        return str((config_map.get("data") or {}).get(DEFAULTS_KEY, ""))
