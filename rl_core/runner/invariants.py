"""The invariant fields: settings that determine what a run computes, and that must not differ when a checkpoint is resumed.

A field that only one of the two releases knows is compared as if the other had its default, which turns the new feature off. A checkpoint
therefore stays usable after an upgrade that added fields, and after a downgrade.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.api.defaults import short
from rl_core.api.document import holds
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.plan.model_facts import ModelFacts

INVARIANT_FIELDS = (
    "model",
    "data",
    "algorithm",
    "actor.optimizer",
    "actor.gradClip",
    "actor.dropout",
    "rollout.sampling",
    "rollout.maxSequenceLength",
    "env.type",
    "env.reward",
    "env.agent",
    "env.command",
    "env.factory",
    "env.options",
    "env.maxTurns",
)
"""Spec fields that determine what a run computes, except their subfields in `MAY_CHANGE`."""
MAY_CHANGE = frozenset(
    {
        "steps",
        "maxStaleness",
        "learningRate",
        "distributed",
        "path",
        "maxDroppedGroups",
        "maxConsecutiveDrops",
        "maxGenerationBatches",
    }
)
NOTHING = object()
SIZES = ("hidden", "layers", "vocab", "kv_heads", "head_dim")
"""Sizes of a model that a checkpoint stores. If they differ from those of the job, the checkpoint belongs to another model."""


def state_of(spec: RLJobSpec) -> dict[str, Any]:
    """Return the part of the spec that a checkpoint stores.

    "mathematics" are the invariant fields by YAML path, "changed" all fields that differ from their default, and "model" the sizes of the
    model.
    """
    return {"mathematics": invariants(spec), "changed": short(spec), "model": sizes(spec)}


def sizes(spec: RLJobSpec) -> dict[str, int]:
    """Return the sizes of the job's model by name, such as its number of layers; empty if its config.json does not give them."""
    try:
        model = ModelFacts.from_config(spec.model.path)
    except ConfigError:
        return {}
    return {name: getattr(model, name) for name in SIZES}


def other_model(saved: Mapping[str, Any], spec: RLJobSpec) -> list[str]:
    """Return a text for each size that differs between the model of the checkpoint and that of the job; unknown sizes are left out."""
    saved_sizes, current_sizes = saved.get("model", {}), sizes(spec)
    return [
        f"{name} {saved_sizes[name]} (saved), {current_sizes[name]} (now)"
        for name in SIZES
        if name in saved_sizes and name in current_sizes and saved_sizes[name] != current_sizes[name]
    ]


def changes(saved: Mapping[str, Any], spec: RLJobSpec) -> list[str]:
    """Return a text for each invariant field that differs between `saved`, a result of `state_of`, and `spec`."""
    saved_fields, given_fields = saved.get("changed", {}), short(spec)
    messages = []
    for field, new_value in sorted(invariants(spec).items()):
        old_value = saved["mathematics"].get(field, new_value)
        for below, old, new in _differences(old_value, new_value):
            path = (*field.split("."), *below)
            added = old is NOTHING and not holds(given_fields, path)
            removed = new is NOTHING and not holds(saved_fields, path)
            if not added and not removed:
                messages.append(f"{'.'.join(path)}: {_word(old)} (saved), {_word(new)} (now)")
    return messages


def refuse_changes(saved: Mapping[str, Any], spec: RLJobSpec) -> None:
    """Raise ConfigError if a run of `spec` cannot continue from a checkpoint. `saved` is the result of `state_of` in that checkpoint."""
    if differences := other_model(saved, spec):
        raise ConfigError(
            f"a checkpoint must be of the job's model, got {', '.join(differences)}; set model.path to the model that the saved run began from, "
            "or resume from another run"
        )
    changed = changes(saved, spec)
    if changed and not spec.checkpoint.allow_spec_change:
        raise ConfigError(
            f"a resumed job must compute what the saved one did, got changes in {'; '.join(changed)}; restore them, or set "
            "checkpoint.allowSpecChange: true"
        )


def invariants(spec: RLJobSpec) -> dict[str, Any]:
    """Return the values of the invariant fields by YAML path."""
    document = spec.model_dump(mode="json", by_alias=True)
    values: dict[str, Any] = {}
    for path in INVARIANT_FIELDS:
        value: Any = document
        for part in path.split("."):
            value = value[part]
        values[path] = (
            {key: item for key, item in value.items() if key not in MAY_CHANGE} if isinstance(value, dict) else value
        )
    return values


def digest(spec: RLJobSpec) -> str:
    """Return the BLAKE2b digest of the invariant fields, hexadecimal."""
    return hashlib.blake2b(json.dumps(invariants(spec), sort_keys=True).encode(), digest_size=16).hexdigest()


def _differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield (path, old value, new value) for every leaf that differs. NOTHING stands for a missing leaf. Lists are leaves."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key, NOTHING), new.get(key, NOTHING), (*path, key))
    elif old != new:
        yield path, old, new


def _word(value: Any) -> str:
    return repr(None if value is NOTHING else value)
