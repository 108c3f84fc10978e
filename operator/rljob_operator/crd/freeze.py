"""Transition rules: the API server rejects changes of fixed fields while a job is not suspended.

Fixed are all fields of spec except:
- fields that the runner applies while it runs,
- fields that only the operator reads,
- pod fields, which take effect when a pod is started the next time.

The rules check whether the old object is suspended, so a fixed field is changed by two writes: suspend, then edit. `env.options` and
`rollout.engineArgs` are free-form and cannot be compared by CEL; the runner rejects a change of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pydantic import BaseModel

from rl_core.api.groups import GroupSpec
from rl_core.api.job import MANAGER, MUTABLE_FIELDS, OPERATOR_FIELDS, RLJobSpec
from rl_core.api.placed_groups import NUMBERED
from rl_core.api.pods import PodSpec
from rl_core.plan.groups import BUILT_IN
from rljob_operator.crd.rules import Schema, field_at, field_or_default, rule_entry

POD_FIELDS = frozenset(field.alias for field in PodSpec.model_fields.values())
FREE = (*MUTABLE_FIELDS, *OPERATOR_FIELDS, "env.options", "rollout.engineArgs", "groups")
QUOTED = (
    "model.path",
    "model.dtype",
    "algorithm.name",
    "algorithm.promptsPerStep",
    "algorithm.groupSize",
    "algorithm.seed",
    "actor.backend",
    "actor.replicas",
    "actor.gpus",
    "rollout.engine",
    "rollout.gpus",
    "env.type",
    "placement.mode",
)
"""Fields with a separate rule, whose message contains both values. The others are compared block by block, to keep the definition small."""
SUSPENDED = "oldSelf.?suspend.orValue(false)"
WAY_OUT = "while the job is not suspended, got {}; set suspend: true, then edit it"


def frozen_fields(model: type[BaseModel] = RLJobSpec, prefix: str = "") -> Iterator[str]:
    """Yield the paths below spec of all fixed fields.

    A nested block without any mutable field is one path and is compared as a whole.
    """
    for field in model.model_fields.values():
        path = f"{prefix}{field.alias}"
        if path in FREE or (prefix.rstrip(".") in BUILT_IN and field.alias in POD_FIELDS):
            continue
        annotation: Any = field.annotation
        is_block = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        if is_block and any(name.startswith(f"{path}.") for name in (*FREE, *QUOTED)):
            yield from frozen_fields(annotation, f"{path}.")
        else:
            yield path


def transition_rules() -> list[Schema]:
    """Return the entries of x-kubernetes-validations for `spec`."""
    new, old = (f"(has({root}.managedBy) ? {root}.managedBy : '{MANAGER}')" for root in ("self", "oldSelf"))
    fixed_rule = rule_entry(
        holds=f"{new} == {old}",
        refusal="managedBy must stay %s, got %s; delete the job and create it anew",
        values=(old, new),
        field="managedBy",
    )
    paths_of_spec = [path for path in frozen_fields() if path not in QUOTED]
    blocks = groupby(paths_of_spec, key=lambda path: path.partition(".")[0])
    rules = [
        *map(_quoted, QUOTED),
        *map(_placed, (name for name, group in BUILT_IN.items() if group.elastic)),
        _synchrony(),
        *_groups(),
    ]
    return [fixed_rule, *rules, *(_block(block, list(paths)) for block, paths in blocks)]


def _placed(group: str) -> Schema:
    """Return the rule that forbids scaling a group whose pods `placement.componentPlacement` numbers."""
    path = f"{group}.replicas"
    new, old = (field_or_default(path, RLJobSpec, root=root) for root in ("self", "oldSelf"))
    return rule_entry(
        holds=f"{SUSPENDED} || !({NUMBERED.format(group)}) || {new} == {old}",
        refusal=f"{path} must stay %d while placement.componentPlacement numbers its pods, got %d; set suspend: true, then edit both",
        values=(old, new),
        field=path,
    )


def _synchrony() -> Schema:
    """Return the rule that a running job cannot change between on-policy and asynchronous training, which are different programs."""
    path = "algorithm.maxStaleness"
    new, old = (field_or_default(path, RLJobSpec, root=root) for root in ("self", "oldSelf"))
    return rule_entry(
        holds=f"{SUSPENDED} || ({new} > 0) == ({old} > 0)",
        refusal=f"{path} must stay %s {WAY_OUT.format('%d')}",
        values=(f"({old} > 0 ? 'above 0' : '0')", new),
        field="algorithm",
    )


def _groups() -> Iterator[Schema]:
    """Yield the rules on `groups`: the names stay, as the keys of the job are made for them; of the rest, pod fields and replicas are free.

    The fields that a rule names are those that the definition describes; a change of `config` is refused by the runner.
    """
    name = "self.groups.all(g, oldSelf.groups.exists(o, o.name == g.name))"
    yield rule_entry(
        holds=f"has(self.groups) == has(oldSelf.groups) && (!has(self.groups) || (self.groups.size() == oldSelf.groups.size() && {name}))",
        refusal="groups must keep their names; delete the job and create it anew",
        field="groups",
    )
    unchanged = " && ".join(
        _same(field) for field in ("worker", "lifecycle", "processesPerPod", "gpus", "callers", "weights")
    )
    lifecycle = f"({field_or_default('lifecycle', GroupSpec, root='g')} == 'elastic' || {_same('replicas')})"
    yield rule_entry(
        holds=f"{SUSPENDED} || !has(self.groups) || self.groups.all(g, oldSelf.groups.all(o, o.name != g.name || ({unchanged} && {lifecycle})))",
        refusal=(
            f"groups must stay as they are but for replicas of elastic groups and the pod fields {WAY_OUT.format('a change')}"
        ),
        field="groups",
    )


def _same(field: str) -> str:
    """Return the expression that a field of the groups `g` and `o` is equal, absent or default alike."""
    if field_at(field, GroupSpec).is_required():
        return f"g.{field} == o.{field}"
    if field_at(field, GroupSpec).get_default(call_default_factory=True) == []:
        return f"has(g.{field}) == has(o.{field}) && (!has(g.{field}) || g.{field} == o.{field})"
    return " == ".join(field_or_default(field, GroupSpec, root=root) for root in "go")


def _quoted(path: str) -> Schema:
    """Return the rule for one field."""
    if field_at(path, RLJobSpec).is_required():
        new, old = f"self.{path}", f"oldSelf.{path}"
    else:
        new, old = (field_or_default(path, RLJobSpec, root=root) for root in ("self", "oldSelf"))
    return rule_entry(
        holds=f"{SUSPENDED} || {new} == {old}",
        refusal=f"{path} must stay %s {WAY_OUT.format('%s')}",
        values=(old, new),
        field=path.partition(".")[0],
    )


def _block(block: str, paths: list[str]) -> Schema:
    """Return the rule for the other fixed fields of a block; its message names the mutable fields."""
    free = [path.removeprefix(f"{block}.") for path in FREE if path.startswith(f"{block}.")]
    free += ["the pod fields"] if block in BUILT_IN else []
    but = f" but for {', '.join(free)}" if free else ""
    return rule_entry(
        holds=f"{SUSPENDED} || ({' && '.join(_unchanged(path) for path in paths)})",
        refusal=f"{block} must stay as it is{but} {WAY_OUT.format('a change')}",
        field=block,
    )


def _unchanged(path: str) -> str:
    """Return the CEL expression that a field is unchanged. An absent field equals its default, if that can be written in CEL."""
    field = field_at(path, RLJobSpec)
    if isinstance(field.get_default(call_default_factory=True), bool | int | float):
        return " == ".join(field_or_default(path, RLJobSpec, root=root) for root in ("self", "oldSelf"))
    # Optionals cannot be compared themselves: the API server finds no bound on their size and calls the rule too costly.
    optional = path.replace(".", ".?")
    is_set, was_set = f"self.?{optional}.hasValue()", f"oldSelf.?{optional}.hasValue()"
    return f"{is_set} == {was_set} && (!{is_set} || self.{path} == oldSelf.{path})"
