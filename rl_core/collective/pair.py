"""Process groups of two members, over which the workers of users send tensors from one device to another.

There is one group for each sender and receiver. It is kept, and formed again after an error or when the receiver was replaced. The sender is
rank 0 and holds the store.
"""

import itertools
import threading
import time

import torch

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
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

    def plan(self, receiver: str, receiver_key: str) -> GroupPlan:
        """Return the plan of the group in which this process sends to `receiver`.

        A plan tells both members where they meet, the address of the store, and which generation of the group they form. It is a new
        generation unless both hold the same working group. `receiver_key` is what `key_of` returns at the receiver. Raises NotFormed if
        this process cannot start the store.
        """
        name = _group_name(self._name, receiver)
        with self._lock:
            group = self._groups.get(name)
            if group is not None and self._is_usable(group) and group.plan.key == receiver_key:
                return group.plan
            try:
                self._store = self._store or GroupStore(self._host)
            except RuntimeError as error:  # torch raises nothing narrower
                raise NotFormed(f"{self._name} cannot start a store at {self._host}: {error}") from error
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

    def key_of(self, sender: str) -> str:
        """Return the key of the working group in which this process receives from `sender`; "" if there is none."""
        with self._lock:
            group = self._groups.get(_group_name(sender, self._name))
            return group.plan.key if group is not None and self._is_usable(group) else ""

    def formed(self, plan: GroupPlan) -> TensorGroup | None:
        """Return the group of `plan` if this process has formed it and it works, else None."""
        with self._lock:
            group = self._groups.get(plan.name)
            return group if group is not None and group.plan == plan and self._is_usable(group) else None

    def form(self, plan: GroupPlan, device: torch.device, *, timeout: float) -> TensorGroup:
        """Form the group of `plan` for tensors on `device` within `timeout` seconds, in the place of an earlier generation.

        Raises NotFormed if that fails, or if `abort` is called meanwhile.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._plans[plan.name] = plan
            earlier = self._groups.pop(plan.name, None)
        if earlier is not None:
            earlier.close()
        try:
            group = TensorGroup.form(plan, plan.members.index(self._name), timeout=timeout)
            # NCCL connects with the first operation, so that its failure is seen here.
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            group.broadcast(probe, timeout=max(0.001, deadline - time.monotonic()))
        except (ConfigError, DeadlineExceeded, InfrastructureError) as error:
            raise NotFormed(str(error)) from error
        with self._lock:
            is_current = self._plans.get(plan.name) == plan
            if is_current:
                self._groups[plan.name] = group
        if not is_current:
            group.abort("it was given up while it formed")
            raise NotFormed(f"group {plan.key} was given up while it formed")
        return group

    def abort(self, plan: GroupPlan, reason: str) -> None:
        """End the group of `plan`, also while it forms. If this process is the sender, the store notifies the receiver."""
        with self._lock:
            if self._plans.get(plan.name) == plan:
                del self._plans[plan.name]
            group = self._groups.get(plan.name)
            if group is not None and group.plan == plan:
                del self._groups[plan.name]
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

    def _is_usable(self, group: TensorGroup) -> bool:
        """Return whether the group works and its plan is that of the latest generation. The caller holds the lock."""
        return not group.poisoned and self._plans.get(group.plan.name) == group.plan


def _group_name(sender: str, receiver: str) -> str:
    return f"tensors/{sender}/{receiver}"
