"""Settings of a request: read from a GenerationConfig, refused where they would bias training, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rl_core.api.errors import RolloutConfigError
from rl_core.rollouts.generation import GenerationConfig

HONOURED = frozenset(
    {"backend", "model_name", "max_new_tokens", "temperature", "top_p", "top_k", "val_temperature", "val_top_p"}
    | {"val_top_k", "stop_token_ids", "stop_strings", "_pad_token_id", "use_async_rollouts", "colocated"}
)
"""Keys of GenerationConfig that mean something here; its others must be empty, keys that it does not have are refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings of one request."""

    max_new_tokens: int = 64
    """Longest generation, tokens."""
    temperature: float = 1.0
    """Softmax temperature; 0 = greedy."""
    top_p: float = 1.0
    """Nucleus, after top_k; 1 = off."""
    top_k: int | None = None
    """Most likely tokens kept; None = off."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the generation besides end of sequence."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the generation; they stay in text and tokens."""
    ignore_eos: bool = False
    """Go on after end of sequence (benchmarks)."""

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 0, ">= 0"),
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k is None or self.top_k >= 1, "None or >= 1"),
            "stop_strings": (all(isinstance(s, str) and s for s in self.stop_strings), "texts that are not empty"),
        }
        for name, (good, rule) in rules.items():
            if not good:
                raise RolloutConfigError(
                    f"{name} must be {rule}, got {getattr(self, name)}; correct the sampling settings"
                )

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is taken."""
        return self.temperature == 0

    @classmethod
    def of(cls, given: Any) -> SamplingParams:
        """Return `given` (SamplingParams, a mapping, or an object with such attributes) as SamplingParams.

        `stop`, `do_sample` and `greedy` are understood too; other unknown keys of a mapping are refused.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            values = dict(given)
        else:
            names = [field.name for field in fields(cls)] + ["stop"]
            values = {name: getattr(given, name) for name in names if hasattr(given, name)}
        if "stop" in values:
            values["stop_strings"] = values.pop("stop")
        sampled = values.pop("do_sample", True) and not values.pop("greedy", False)
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise RolloutConfigError(f"sampling settings {', '.join(unknown)} are not known; remove them")
        for name in ("stop_strings", "stop_token_ids"):
            values[name] = unique(values.get(name))
        params = cls(**values)
        return params if sampled else replace(params, temperature=0.0, top_p=1.0, top_k=None)


def unique(values: Any) -> tuple[Any, ...]:
    """Return `values` (None, one string, or several) without repetitions, in order."""
    if values is None:
        return ()
    return tuple(dict.fromkeys([values] if isinstance(values, str) else values))


def sampling_params(
    config: Mapping[str, Any], *, backend: str, validation: bool, allow_truncated: bool
) -> SamplingParams:
    """Return the settings of GenerationConfig as SamplingParams.

    Raises RolloutConfigError for keys that are not honoured; in training for temperature <= 0, and for top_p or top_k
    unless `allow_truncated` (algorithms.md 7: sampling from a cut distribution biases the policy ratio).
    """
    _check_keys(config, backend)
    prefix = "val_" if validation else ""
    temperature = config.get(f"{prefix}temperature", 0.0 if validation else 1.0)
    top_p, top_k = config.get(f"{prefix}top_p", 1.0), config.get(f"{prefix}top_k")
    if not validation and temperature <= 0:
        raise RolloutConfigError(f"temperature must be > 0 for training, got {temperature}; use greedy for validation")
    if not validation and not allow_truncated and (top_p < 1 or top_k is not None):
        raise RolloutConfigError(
            f"top_p and top_k bias the policy ratio, got top_p {top_p}, top_k {top_k}; remove them or set "
            "algorithm.allowTruncatedSampling"
        )
    return SamplingParams(
        max_new_tokens=config.get("max_new_tokens", SamplingParams().max_new_tokens),
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=top_k,
        stop_token_ids=unique(config.get("stop_token_ids")),
        stop_strings=unique(config.get("stop_strings")),
    )


def _check_keys(config: Mapping[str, Any], backend: str) -> None:
    known = GenerationConfig.__annotations__
    unknown = sorted(key for key, value in config.items() if key not in HONOURED and (value or key not in known))
    if unknown:
        raise RolloutConfigError(
            f"generation settings {', '.join(unknown)} are not honoured by the {backend} engine; remove them"
        )
    if config.get("backend") not in (None, backend):
        raise RolloutConfigError(
            f"backend must be {backend!r} for the {backend} engine, got {config['backend']!r}; change one of the two"
        )
    if config.get("use_async_rollouts", True) is False:
        raise RolloutConfigError(
            "use_async_rollouts must be true, got False: rollouts are always asynchronous; remove it"
        )
    if (config.get("colocated") or {}).get("enabled"):
        raise RolloutConfigError(
            f"colocated.enabled is not honoured by the {backend} engine, got true; set it to false"
        )


def pad_id(config: Mapping[str, Any], tokenizer: Any) -> int:
    """Return the padding of ids: the configured one, else the tokenizer's, else its end of sequence."""
    candidates = (
        config.get("_pad_token_id"),
        getattr(tokenizer, "pad_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    return next((int(one) for one in candidates if one is not None), 0)
