"""Sampling settings of a row (`SamplingParams`), the same for every engine, and the seeds of samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from rl_core.api.errors import RolloutConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings of one row. Raises RolloutConfigError for a value out of range."""

    max_new_tokens: int = 64
    """Longest generation, tokens."""
    temperature: float = 1.0
    """Softmax temperature; 0 = greedy."""
    top_p: float = 1.0
    """Nucleus sampling, applied after top_k; 1 = off."""
    top_k: int | None = None
    """Number of most likely tokens that are kept; None = off."""
    min_p: float = 0.0
    """Smallest probability of a token as a share of the most likely one's, applied after top_p; 0 = off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it was generated before."""
    repetition_penalty: float = 1.0
    """Factor by which logits of tokens that were generated before are reduced (Keskar et al. 2019); after the other penalties; 1 = off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit), after the penalties."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the generation, in addition to the end-of-sequence ids."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the generation; they stay in text and tokens."""
    ignore_eos: bool = False
    """Do not end at end-of-sequence ids (used by benchmarks)."""

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 0, ">= 0"),
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k is None or self.top_k >= 1, "None or >= 1"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            "repetition_penalty": (0 < self.repetition_penalty <= 2, "in (0, 2]"),
            "logit_bias": (all(-100 <= bias <= 100 for _, bias in self.logit_bias), "in [-100, 100]"),
            "stop_strings": (all(isinstance(s, str) and s for s in self.stop_strings), "texts that are not empty"),
        }
        for name, (is_valid, rule) in rules.items():
            if not is_valid:
                raise RolloutConfigError(
                    f"{name} must be {rule}, got {getattr(self, name)}; correct the sampling settings"
                )

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Return whether logits depend on the tokens that were generated before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def unbiased(self) -> SamplingParams:
        """Return the settings under which tokens are drawn from softmax(logits / temperature), as the trainer scores them."""
        params = replace(self, top_p=1.0, top_k=None, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0)
        return replace(params, repetition_penalty=1.0, logit_bias=())

    @classmethod
    def of(cls, given: SamplingParams | Mapping[str, Any]) -> SamplingParams:
        """Return `given` as SamplingParams; raises RolloutConfigError for unknown keys of a mapping."""
        if isinstance(given, SamplingParams):
            return given
        values = dict(given)
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise RolloutConfigError(f"sampling settings {', '.join(unknown)} are not known; remove them")
        for name in ("stop_strings", "stop_token_ids"):
            values[name] = unique(values.get(name))
        return cls(**values)

    def for_row(self, stop_strings: Sequence[str], max_new_tokens: int | None, greedy: bool) -> SamplingParams:
        """Return the settings of one row: more stop strings, another length limit (None = the same), or greedy decoding."""
        params = replace(
            self,
            stop_strings=unique((*self.stop_strings, *stop_strings)),
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )
        return replace(params.unbiased(), temperature=0.0) if greedy else params

    def stop_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """Return all ids that end a row, given the model's end-of-sequence ids."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))


def unique(values: Any) -> tuple[Any, ...]:
    """Return `values` (None, one string, or several) without repetitions, in order."""
    if values is None:
        return ()
    return tuple(dict.fromkeys([values] if isinstance(values, str) else values))


def sample_seed(seed: int, group_id: str, index: int, attempt: int = 1) -> int:
    """Return the 63-bit sampling seed of generation `index` of a prompt group: BLAKE2b of the four arguments.

    Generations of a group differ, and a resumed run repeats them. `attempt` rises with retries after data and deadline failures only.
    """
    text = "\x1f".join((str(seed), str(group_id), str(index), str(attempt)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
