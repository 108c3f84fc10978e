"""Process groups of two members, over which the workers of users send tensors from one device to another.

There is one group for each sender and receiver. It is kept, and formed again after an error or when the receiver was replaced. The sender is
rank 0 and holds the store.
"""

import itertools
import threading

import torch

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.collective.group import GroupStore, TensorGroup
from rl_core.messages.weights import GroupPlan


class NotFormed(InfrastructureError):
    """The two members could not connect. No byte of the tensor was sent."""


class PairGroups:
    """The groups in which this process sends or receives. Methods may be called by any thread."""

    def __init__(self, *, name: str, host: str, epoch: int, backend: str) -> None:
        """`name`: member name of this process. `host`: address at which others reach it. `backend`: nccl or gloo."""
        self._name, self._host, self._epoch, self._backend = name, host, epoch, backend
        self._store: GroupStore | None = None
        self._generations = itertools.count(1)
        self._plans: dict[str, GroupPlan] = {}
        """By name of the group: the plan of the generation that may be used."""
        self._groups: dict[str, TensorGroup] = {}
        """By name of the group: the formed group."""
        self._lock = threading.Lock()
        """Guards the fields above. It is not held while a group forms."""

    def plan(self, receiver: str, held: str) -> GroupPlan:
        """Return the plan of the group in which this process sends to `receiver`.

        It is that of a new generation unless this process and the receiver hold the same working group; `held` is the key of the receiver's.
        """
        name = _group_name(self._name, receiver)
        with self._lock:
            plan, group = self._plans.get(name), self._groups.get(name)
            if (
                plan is not None
                and group is not None
                and group.plan == plan
                and not group.poisoned
                and plan.key == held
            ):
                return plan
            if self._store is None:
                self._store = GroupStore(self._host)
            plan = self._plans[name] = GroupPlan(
                name=name,
                epoch=self._epoch,
                generation=next(self._generations),
                members=(self._name, receiver),
                backend=self._backend,
                host=self._store.host,
                port=self._store.port,
            )
            return plan

    def held(self, sender: str) -> str:
        """Return the key of the working group in which this process receives from `sender`; "" if there is none."""
        with self._lock:
            group = self._groups.get(_group_name(sender, self._name))
            return "" if group is None or group.poisoned else group.plan.key

    def transfer(self, plan: GroupPlan, data: torch.Tensor, *, form_timeout: float, timeout: float) -> None:
        """Send `data` (uint8) to the receiver of `plan`, or receive into it, according to the rank of this process in `plan`.

        Forms the group before its first use, within `form_timeout` seconds; NotFormed is raised if that fails. `timeout` is in seconds and
        limits the transfer itself. Other errors are those of `TensorGroup.broadcast`.
        """
        group = self._formed(plan, data.device, form_timeout)
        group.broadcast(data, timeout=timeout)

    def abort(self, plan: GroupPlan, reason: str) -> None:
        """End the group of `plan`, also while it forms. Its receiver learns of it from the store if this process is the sender."""
        with self._lock:
            if self._plans.get(plan.name) == plan:
                del self._plans[plan.name]
            group = self._groups.get(plan.name)
            store = self._store if plan.members[0] == self._name else None
        if store is not None:
            store.release(plan)
        if group is not None and group.plan == plan:
            group.abort(reason)

    def close(self) -> None:
        """Leave all groups."""
        with self._lock:
            groups, self._groups, self._plans = list(self._groups.values()), {}, {}
        for group in groups:
            group.close()

    def _formed(self, plan: GroupPlan, device: torch.device, timeout: float) -> TensorGroup:
        with self._lock:
            group = self._groups.get(plan.name)
            if group is not None and group.plan == plan:
                return group
            self._plans[plan.name] = plan
            self._groups.pop(plan.name, None)
        if group is not None:
            group.close()
        try:
            formed = TensorGroup.form(plan, plan.members.index(self._name), timeout=timeout)
            # NCCL connects with the first operation, so that its failure is seen here.
            formed.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), timeout=timeout)
        except (InfrastructureError, DeadlineExceeded) as error:
            raise NotFormed(str(error)) from error
        with self._lock:
            current = self._plans.get(plan.name) == plan
            if current:
                self._groups[plan.name] = formed
        if not current:
            formed.abort("it was given up while it formed")
            raise NotFormed(f"group {plan.key} was given up while it formed")
        return formed


def _group_name(sender: str, receiver: str) -> str:
    return f"tensors/{sender}/{receiver}"
