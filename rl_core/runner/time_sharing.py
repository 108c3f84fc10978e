"""Colocated and hybrid placement: the actor and the rollouts in its pods use one set of devices in turns, by the device lease.

Hybrid placement has further rollouts on devices of their own; they take no part in the turns.

                 actor on the device              rollouts on the device
    generating   -                                weights, KV cache
    training     weights, gradients, optimizer    -
    syncing      weights                          weights

One group offloads before the other onloads. The actor offloads optimizer state, gradients and weights, in this order. A rollout onloads in
parts: its weights for the sync, and its KV cache once the weights of the actor are offloaded. With `actor.offload.optimizer` the optimizer
state is on the device during the optimizer step only.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

from rl_core.api.errors import InfrastructureError, RLJobError, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.messages.members import MemberState
from rl_core.plan.groups import ROLLOUT
from rl_core.plan.slots import colocated_rollouts
from rl_core.runner.device_lease import DeviceLease, Use
from rl_core.runner.device_schedule import DeviceSchedule, DisaggregatedSchedule, MoveTotals, OffloadingSchedule
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.member import Member

logger = logging.getLogger(__name__)
HOLDS_ENGINE = (MemberState.READY, MemberState.UPDATING, MemberState.SERVING, MemberState.SUSPECT, MemberState.DRAINING)
"""States of a rollout whose process may have an engine on the device. A draining one frees the device only when it ends."""


class Resident(NamedTuple):
    """The parts of each worker group's memory that are on the shared devices during one use."""

    actor: frozenset[str]
    rollout: frozenset[str]


NOTHING: frozenset[str] = frozenset()
RESIDENT = {
    Use.GENERATING: Resident(NOTHING, frozenset({"weights", "kv_cache"})),
    Use.SYNCING: Resident(frozenset({"weights"}), frozenset({"weights"})),
    Use.TRAINING: Resident(frozenset({"weights", "gradients", "optimizer"}), NOTHING),
}


class ColocatedSchedule:
    """Implements `DeviceSchedule` for worker groups that share devices. Lost rollouts are left out of hand-overs."""

    def __init__(self, spec: RLJobSpec, *, cluster: Cluster, actor: WorkerGroup) -> None:
        """Hand the devices over between `actor` and the colocated rollouts of `cluster`, within the deadlines of `spec`."""
        self._cluster, self._actor, self._deadlines = cluster, actor, spec.runtime.deadlines
        self._colocated = frozenset(f"rollout:{rank}" for rank in range(colocated_rollouts(spec)))
        """Names of the rollouts in the pods of the actor. Hybrid placement has further rollouts with devices of their own."""
        self._always_offloaded = frozenset({"optimizer"}) if spec.actor.offload.optimizer else NOTHING
        """Parts of the actor that are onloaded by the optimizer step itself, and not for the whole training."""
        self._lease = DeviceLease(self._hand_over, seconds=spec.runtime.deadlines.wait_ready)
        self._moves = MoveTotals()

    def generating(self) -> AbstractContextManager[object]:
        """Offload the actor and onload the rollouts, if it is not so already."""
        return self._lease.using(Use.GENERATING)

    def training(self) -> AbstractContextManager[object]:
        """Offload the rollouts and onload the actor, if it is not so already."""
        return self._lease.using(Use.TRAINING)

    def syncing(self) -> AbstractContextManager[object]:
        """Have the weights of actor and rollouts on the devices, and nothing else."""
        return self._lease.using(Use.SYNCING)

    @contextmanager
    def joining(self, name: str) -> Iterator[None]:
        """Wait until the devices are used for generation, then onload the rollout `name` and run the block.

        A process that was declared lost may come back with its engine on a device that the actor uses meanwhile, so it is offloaded first.
        """
        if name not in self._colocated:
            yield
            return
        if self._lease.use is not Use.GENERATING:
            self._occupy(name, NOTHING)
        with self._lease.shared(Use.GENERATING, seconds=self._deadlines.wait_ready):
            self._occupy(name, RESIDENT[Use.GENERATING].rollout)
            yield

    def _occupy(self, name: str, parts: Iterable[str]) -> None:
        with suppress(InfrastructureError):  # a new process holds no worker yet, and nothing of the device
            self._cluster.call(name, "occupy", sorted(parts), self._lease.token, timeout=self._deadlines.weight_sync)

    def metrics(self) -> dict[str, float]:
        """Return `offload/*` and `onload/*` since the last call."""
        return self._moves.take()

    def devices(self) -> dict[str, Any]:
        """Return the current use of the devices and the members that hold them, for `/status`.

        `expiresIn` is the number of seconds after which a member that stays silent is declared lost and no longer holds the devices.
        """
        lease, now = self._lease, self._cluster.hub.clock()
        use = lease.use
        holders = [member for role in (use.roles if use else ()) for member in self._sharing(role)]
        expiry = {member.name: max(self._deadlines.lost - (now - member.last_seen), 0.0) for member in holders}
        return {
            "use": use.value if use else None,
            "token": lease.token,
            "seconds": round(lease.seconds_in_use(), 1),
            "handOverSeconds": round(lease.moved_seconds, 3),
            "holders": [{"name": name, "expiresIn": round(seconds, 1)} for name, seconds in expiry.items()],
        }

    # --- the hand-over -----------------------------------------------------------------------------------------------

    def _hand_over(self, previous: Use | None, use: Use, token: int) -> None:
        resident = RESIDENT[use]
        common = resident.rollout & RESIDENT[previous].rollout if previous else NOTHING
        if previous is None or common != RESIDENT[previous].rollout:
            self._have_rollouts(common, token)
        self._moves.add(
            self._actor.occupy(sorted(resident.actor - self._always_offloaded)).wait(self._deadlines.weight_sync)
        )
        if common != resident.rollout:
            self._have_rollouts(resident.rollout, token)

    def _have_rollouts(self, parts: Iterable[str], token: int) -> None:
        """Have exactly `parts` of each rollout on the devices.

        A rollout that fails to do so is declared lost and has to join again.
        """
        members = [member for member in self._sharing(ROLLOUT) if member.state in HOLDS_ENGINE]
        seconds, part_names = self._deadlines.weight_sync, sorted(parts)
        calls = [(m, self._cluster.submit(m.name, "occupy", [part_names, token], {}, timeout=seconds)) for m in members]
        for member, call in calls:
            try:
                call.future.result()
            except WorkerLost as error:
                logger.warning("%s has lost the devices: %s", member.name, error)
            except RLJobError as error:
                self._give_up(member, error)

    def _sharing(self, role: str) -> list[Member]:
        return [m for m in self._cluster.members(role) if m.group != ROLLOUT or m.name in self._colocated]

    def _give_up(self, member: Member, error: RLJobError) -> None:
        logger.warning("%s loses the devices, it did not hand them over: %s", member.name, error)
        self._cluster.hub.declare_lost(member, f"it did not hand the devices over: {error}")


def build_device_schedule(spec: RLJobSpec, *, cluster: Cluster, actor: WorkerGroup) -> DeviceSchedule:
    """Return the device schedule for the placement and the offload settings of the job."""
    if colocated_rollouts(spec):
        return ColocatedSchedule(spec, cluster=cluster, actor=actor)
    if (offload := spec.actor.offload) != type(offload)():
        return OffloadingSchedule(offload.resident, actor=actor, seconds=spec.runtime.deadlines.weight_sync)
    return DisaggregatedSchedule()
