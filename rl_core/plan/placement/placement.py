"""The placement of one process: a record, and the environment variables that hold it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rl_core.api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one process runs. The launch plan writes it into the environment of the process with `to_env`, which reads it with `from_env`."""

    rank: int
    """Rank in its group of processes."""
    cluster_node_rank: int
    """Rank of its node in the inventory."""
    placement_node_rank: int
    """Index of its node among the nodes this group uses, in order of first use."""
    local_rank: int
    """Index among this group's processes on the node."""
    local_world_size: int
    """Number of this group's processes on the node."""
    accelerator_type: str | None
    """Type of the node's accelerators."""
    visible_accelerators: list[str]
    """Node-local numbers of the accelerators it may use, as text."""
    local_accelerator_rank: int
    """First visible accelerator; -1 if none."""
    local_hardware_ranks: list[int]
    """Node-local numbers of the units it was given; empty when it was given a node."""
    node_group_label: str
    """Group it was placed through."""
    isolate_accelerator: bool
    """Whether the process sees only its own accelerators."""

    @property
    def device_index(self) -> int:
        """Index of its first accelerator in torch, which numbers the accelerators that the process sees."""
        if self.isolate_accelerator:
            return 0
        return self.local_hardware_ranks[0] if self.local_hardware_ranks else self.local_rank

    def to_env(self) -> dict[str, str]:
        """Return the placement as environment variables; CUDA_VISIBLE_DEVICES hides the accelerators of other processes."""
        devices = ",".join(self.visible_accelerators)
        count = 1 if self.isolate_accelerator else len(self.visible_accelerators) or self.local_world_size
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.device_index),
            "LOCAL_WORLD_SIZE": str(count),
            "NODE_RANK": str(self.placement_node_rank),
            "CLUSTER_NODE_RANK": str(self.cluster_node_rank),
            "NODE_LOCAL_RANK": str(self.local_rank),
            "NODE_LOCAL_WORLD_SIZE": str(self.local_world_size),
            "LOCAL_ACCELERATOR_RANK": str(self.local_accelerator_rank),
            "LOCAL_HARDWARE_RANKS": ",".join(map(str, self.local_hardware_ranks)),
            "VISIBLE_DEVICES": devices,
            "CUDA_VISIBLE_DEVICES": devices,
            # As NVML numbers them; torch alone would begin with the quickest.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "ACCELERATOR_TYPE": self.accelerator_type or "",
            "ISOLATE_ACCELERATOR": str(int(self.isolate_accelerator)),
            "NODE_GROUP_LABEL": self.node_group_label,
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return the placement written in `environ` (None: this process's environment).

        A process that nobody placed is alone on a node without accelerators. Raises ConfigError naming a variable that is not a number.
        """
        env = os.environ if environ is None else environ
        return cls(
            rank=_number(env, "RANK", 0),
            cluster_node_rank=_number(env, "CLUSTER_NODE_RANK", 0),
            placement_node_rank=_number(env, "NODE_RANK", 0),
            local_rank=_number(env, "NODE_LOCAL_RANK", 0),
            local_world_size=_number(env, "NODE_LOCAL_WORLD_SIZE", 1),
            accelerator_type=env.get("ACCELERATOR_TYPE") or None,
            visible_accelerators=_items(env, "VISIBLE_DEVICES"),
            local_accelerator_rank=_number(env, "LOCAL_ACCELERATOR_RANK", -1),
            local_hardware_ranks=[
                _integer("LOCAL_HARDWARE_RANKS", item) for item in _items(env, "LOCAL_HARDWARE_RANKS")
            ],
            node_group_label=env.get("NODE_GROUP_LABEL", "node"),
            isolate_accelerator=_number(env, "ISOLATE_ACCELERATOR", 1) != 0,
        )


def _items(env: Mapping[str, str], name: str) -> list[str]:
    return [item for item in env.get(name, "").split(",") if item]


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    return _integer(name, env[name]) if name in env else default


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable {name} must hold integers, got {text!r}; start the process through `rljob run` or the operator"
        ) from error
