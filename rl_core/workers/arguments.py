"""Encodes and decodes the constructor arguments of a worker class.

Parts of the job's schema travel as class name and JSON. Other values are encoded by the RPC codec. The schema is imported at first use,
because a script without a job does not need it.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.messages.calls import PackedSpec
from rl_core.transports import frames


def pack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in a form that the RPC codec can encode. Raises ConfigError naming an argument that it cannot."""
    packed = [_pack(value) for value in args], {key: _pack(value) for key, value in kwargs.items()}
    try:
        frames.encode(packed)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"arguments of a worker must be plain values, arrays, records or parts of the job, got: {error}"
        ) from error
    return packed


def unpack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that `pack` was given. Raises ConfigError for a schema class outside `rl_core.api`."""
    return [_unpack(value) for value in args], {key: _unpack(value) for key, value in kwargs.items()}


def _pack(value: Any) -> Any:
    from rl_core.api import document
    from rl_core.api.base import Spec

    if isinstance(value, Spec):
        schema = f"{type(value).__module__}:{type(value).__qualname__}"
        return PackedSpec(schema=schema, json=document.text(value))
    return value


def _unpack(value: Any) -> Any:
    if not isinstance(value, PackedSpec):
        return value
    module, _, name = value.schema.partition(":")
    if not module.startswith("rl_core.api."):
        raise ConfigError(f"schema objects live in rl_core.api, got {value.schema}")
    from rl_core.api import document

    return document.read(getattr(importlib.import_module(module), name), value.json)
