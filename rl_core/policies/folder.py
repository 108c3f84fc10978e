"""Reads a policy folder: `config.json` names the class and its arguments; `model.safetensors`, where there is one, has the weights.

    {"policy": "mlp", "arguments": {"observation_size": 4, "num_actions": 2}}

Without weights a policy begins with random ones, which follow from the seed alone, so that all processes begin alike.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from rl_core.api.errors import ConfigError
from rl_core.api.user_code import describe, import_reference

POLICIES = {
    "mlp": "rl_core.policies.mlp:MLPPolicy",
    "cnn": "rl_core.policies.cnn:CNNPolicy",
    "vla": "rl_core.policies.vla:VLAPolicy",
}
"""Name in config.json -> "module:Class"."""
WEIGHTS = "model.safetensors"


def build_policy(config: bytes | str, *, seed: int = 0, origin: str = "config.json") -> nn.Module:
    """Return the policy that the text of a `config.json` describes, with random weights that follow from `seed`.

    `origin` names the file in errors. Raises ConfigError when the text, the class or its arguments are wrong, and when the class lacks
    `predict` or `forward_train`.
    """
    try:
        settings: Any = json.loads(config)
    except ValueError as error:
        raise ConfigError(f"{origin} must be JSON, got {error}; correct it") from error
    name = settings.get("policy") if isinstance(settings, dict) else None
    if not isinstance(name, str):
        raise ConfigError(
            f'{origin} must have the key "policy" ({", ".join(POLICIES)} or module:Class), got none; add it'
        )
    kind = import_reference(POLICIES.get(name, name), field=f"policy in {origin}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            policy = kind(**settings.get("arguments", {}))
        except Exception as error:  # the class may be the user's
            raise ConfigError(f"{origin}: policy {name} could not be built: {describe(error)}; correct it") from error
    lacking = [method for method in ("predict", "forward_train") if not callable(getattr(policy, method, None))]
    if lacking or not isinstance(policy, nn.Module):
        requirement = "be a torch.nn.Module" if not lacking else f"define {' and '.join(lacking)}"
        raise ConfigError(f"{origin}: policy {name} must {requirement}, got {type(policy).__name__}; write it")
    return policy


def load_policy(folder: str | Path, *, seed: int = 0) -> nn.Module:
    """Return the policy of a folder, with its weights if it has some. Raises ConfigError as `build_policy` does, and for other weights."""
    path = Path(folder)
    try:
        config = (path / "config.json").read_bytes()
    except OSError as error:
        raise ConfigError(f"model.path must be a folder with config.json, got {folder}; check the path") from error
    policy = build_policy(config, seed=seed, origin=str(path / "config.json"))
    if (path / WEIGHTS).is_file():
        try:
            policy.load_state_dict(load_file(path / WEIGHTS))
        except RuntimeError as error:
            raise ConfigError(f"{path / WEIGHTS} must fill the policy of config.json exactly: {error}") from error
    return policy
