"""`Episode`: the state of one sample while it runs: message log, counters, reward and how it ended. Used by `multi_turn` only."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_core.api.records import Completion, FinishReason
from rl_core.rollouts.message_log import as_token_tensor


class Episode:
    """One sample while it runs. It alternates generations and environment steps, and ends in one of four ways, given by `finish_reason`:

    - `length` or `seq_limit`: a limit of tokens cut a generation or an observation (the sample is `truncated`);
    - `terminated`: the environment ended the episode;
    - `max_turns`: all turns are used;
    - `stop`: none of these; the model ended its last generation.

    `over` covers the first two, after which no turn may follow; the caller counts turns. Afterwards `completion` and `metrics` are read.
    """

    def __init__(self, sample: Mapping[str, Any], *, seed: int | None, key: str) -> None:
        """Copy the mutable parts of `sample`. `seed` is its sampling seed (None: not repeatable) and `key` its id `{group_id}_g{i}`."""
        self.key = key
        self.seed = seed
        self.prompt_idx = sample["idx"]
        self.task_name = sample.get("task_name")
        self.is_chat = bool(sample.get("chat"))
        self.log = [_copy_message(message) for message in sample["message_log"]]
        info = sample.get("extra_env_info")
        self.env_info = None if info is None else copy.deepcopy(info)
        self.stop_strings = sample.get("stop_strings")
        self.loss_multiplier = float(sample.get("loss_multiplier", 1.0))
        self.reward: float = 0.0
        self.masked = False
        self.reward_components: dict[str, float] = {}
        self.summed_components: dict[str, float] = {}
        self.terminated = False
        self.truncated = False
        self.cut: str | None = None
        self.max_turns_reached = False
        self.turn_input_tokens: list[int] = []
        self.turn_gen_tokens: list[int] = []
        self.env_tokens = 0
        self.times = [time.monotonic()]
        """Start of the episode, then alternately the end of a generation and of an environment step (monotonic seconds)."""
        self.worker_tokens: dict[int, int] = {}
        self.versions: list[int] = []

    def mark(self) -> None:
        """Record the present time as the end of a generation or of an environment step, alternately."""
        self.times.append(time.monotonic())

    @property
    def env_seconds(self) -> float:
        """Seconds spent in environment steps."""
        return sum(after - before for before, after in zip(self.times[1::2], self.times[2::2], strict=False))

    @property
    def over(self) -> bool:
        """Whether the environment or a token limit has ended the episode. False when only the turns are used up."""
        return self.terminated or self.truncated

    def add_response(self, assistant: dict[str, Any], input_length: int, generated: Mapping[str, Any]) -> None:
        """Append a generation. If a limit cut it, the sample is truncated; it is still scored."""
        self.log.append(assistant)
        self.turn_input_tokens.append(input_length)
        self.turn_gen_tokens.append(len(assistant["token_ids"]))
        worker = generated["gen_leader_worker_idx"]
        self.worker_tokens[worker] = self.worker_tokens.get(worker, 0) + generated["gen_tokens"]
        self.versions += [version for _, _, version in assistant["policy_versions"]]
        if generated["truncated"]:
            self.truncated = True
            limited = generated["finish_reason"] == FinishReason.SEQ_LIMIT.value
            self.cut = (FinishReason.SEQ_LIMIT if limited else FinishReason.LENGTH).value

    def add_reward(self, reward: float | None) -> None:
        """Add the reward of one turn.

        None means that no reward applies; the sample is then masked: it gets the reward NaN and is left out of the loss.
        """
        if reward is None:
            self.masked = True
        else:
            self.reward += reward
        for name, value in self.reward_components.items():
            self.summed_components[name] = self.summed_components.get(name, 0.0) + value

    def add_observation(self, observation: Mapping[str, str], ids: Tensor, room: int, *, terminated: bool) -> None:
        """Append the environment's observation, shortened to `room` tokens. `terminated` says that the environment ended the episode.

        The sample is truncated if no token is left for another turn and the episode has not terminated.
        """
        self.terminated = terminated
        if len(ids) >= room:
            ids = ids[: max(0, room)]
            if not terminated and not self.truncated:
                self.truncated, self.cut = True, FinishReason.SEQ_LIMIT.value
        self.env_tokens += len(ids)
        self.log.append({"role": observation["role"], "content": observation["content"], "token_ids": ids})

    def advance(self, metadata: dict[str, Any] | None, stop_strings: list[list[str] | None] | None) -> None:
        """Use the environment's metadata and stop strings for the next turn. None keeps the present ones."""
        if metadata is not None:
            self.env_info = metadata
        if stop_strings is not None and stop_strings[0] is not None:
            self.stop_strings = stop_strings[0]

    @property
    def finish_reason(self) -> str:
        """Why the sample ended, as listed at the class. If several reasons apply, the first in that list."""
        if self.cut is not None:
            return self.cut
        if self.terminated:
            return FinishReason.TERMINATED.value
        return (FinishReason.MAX_TURNS if self.max_turns_reached else FinishReason.STOP).value

    def completion(self, *, default_version: int) -> Completion:
        """Return the completed sample. Its policy versions are those of its tokens, or `default_version` if it has none."""
        versions = self.versions or [default_version]
        return Completion(
            message_log=self.log,  # type: ignore[arg-type]
            env_extras=self.env_info,
            truncated=self.truncated,
            reward=float("nan") if self.masked else self.reward,
            finish_reason=self.finish_reason,
            policy_versions=(min(versions), max(versions)),
            loss_multiplier=0.0 if self.masked else self.loss_multiplier,
            metrics={"turns": len(self.turn_gen_tokens), "gen_tokens": sum(self.turn_gen_tokens)}
            | {f"reward/{name}": value for name, value in self.summed_components.items()},
            seed=self.seed,
        )

    def metrics(self) -> dict[str, Any]:
        """Return the counters of the sample, from which the group's metrics are computed."""
        totals = [a + b for a, b in zip(self.turn_input_tokens, self.turn_gen_tokens, strict=True)]
        return {
            "turn_count": len(self.turn_gen_tokens),
            "assistant_tokens": sum(self.turn_gen_tokens),
            "env_tokens": self.env_tokens,
            "env_seconds": self.env_seconds,
            "times": self.times,
            "max_turns_reached": self.max_turns_reached,
            "turn_gen_tokens": self.turn_gen_tokens,
            "turn_input_tokens": self.turn_input_tokens,
            "turn_total_tokens": totals,
            "per_worker_token_counts": self.worker_tokens,
        }


def group_name(sample: Mapping[str, Any]) -> str:
    """Return the group id of `sample`, or its index if it has none."""
    group_id = sample.get("group_id")
    return str(sample["idx"] if group_id is None else group_id)


def _copy_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a message; arrays become tensors with storage of their own."""
    copied: dict[str, Any] = {}
    for key, value in message.items():
        if isinstance(value, Tensor):
            copied[key] = value.clone()
        elif isinstance(value, str):
            copied[key] = value
        elif hasattr(value, "dtype"):
            copied[key] = torch.tensor(value)
        else:
            copied[key] = copy.deepcopy(value)
    copied["token_ids"] = as_token_tensor(copied["token_ids"])
    return copied
