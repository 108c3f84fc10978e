"""The port to what generates: `Engine`, built by name with `build_engine`. The worker above it knows no engine by itself.

An engine is a model's forward and nothing else: generation, a place for weights, residency. Prompts, environments, sampling
settings, the content check and the gate of versions belong to the worker (`base`, `groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rl_core.api.errors import ConfigError, RLJobError
from rl_core.rollouts.generation import GenerationConfig, GenerationInterface
from rl_core.rollouts.meter import EngineLoad

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec
    from rl_core.weights.target import WeightTarget

PROVEN, UNPROVEN = "engine tensors", "content probe"
"""Values of `Engine.weights_proof`."""
Part = Literal["weights", "kv_cache"]
"""What of an engine may leave its device."""


class Residency(Protocol):
    """What lies on the engine's device. Nothing may run while a part is away; both calls may be repeated."""

    def offload(self, parts: Collection[Part]) -> None:
        """Free the device memory of `parts`."""
        ...

    def onload(self, parts: Collection[Part]) -> None:
        """Bring `parts` back; weights come back as they were, a cache comes back empty."""
        ...


class Engine(Protocol):
    """A model that generates. Implemented by `hf.served.ServedEngine` and `sglang.served.ServedEngine`."""

    @property
    def weight_target(self) -> WeightTarget:
        """Where weights go; its `prepare` is called when nothing generates and nothing new is admitted."""
        ...

    @property
    def residency(self) -> Residency:
        """What may leave the device between two phases."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that new tokens come from; of no meaning before the first `resume`."""
        ...

    @property
    def weights_proof(self) -> str:
        """What proves the served weights: the engine's own tensors, or what they make of a fixed prompt (the content check)."""
        ...

    @property
    def row_capacity(self) -> int:
        """Rows in flight at which no more prompts are worth leasing: those that run, and those that fill their places at once."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest prompt and completion together, tokens."""
        ...

    def generation(self, config: GenerationConfig, *, validation: bool = False) -> GenerationInterface:
        """Return a backend over this engine for `config`; `validation` takes its val_ settings.

        Raises RolloutConfigError for settings that the engine does not honour.
        """
        ...

    async def hold(self, *, keep_cache: bool) -> None:
        """Return once nothing generates; what did goes on from its tokens, as what is submitted meanwhile begins, at the target's `resume`.

        Its keys and values are computed anew then, or kept; kept ones serve no other row.
        """
        ...

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Have `lost(reason)` called when the engine and its weights are gone, `back(None)` when it can be given weights again.

        `back(error)`: it never can. From any thread. An engine in this process is never lost.
        """
        ...

    def load(self) -> EngineLoad:
        """Return what it has to do now. Cheap, and from any thread."""
        ...

    def close(self) -> None:
        """Stop; what is in flight fails as GenerationUnavailable. Blocks; idempotent."""
        ...


BuildEngine = Callable[["RLJobSpec", Mapping[str, bytes], str, int, Callable[[int], Any]], Engine]
"""(spec, files of the model folder by name, device, max_seq_len, on_step) -> Engine; see `build_engine`."""

ENGINES = {"hf": "rl_core.rollouts.hf.served:build", "sglang": "rl_core.rollouts.sglang.served:build"}
"""Engine name of the job -> its `BuildEngine`, imported at first use: each carries a heavy stack."""


def build_engine(
    spec: RLJobSpec, files: Mapping[str, bytes], device: str, max_seq_len: int, on_step: Callable[[int], Any]
) -> Engine:
    """Return the engine `spec.rollout.engine` with unfilled weights, made of the model folder's `files` alone.

    `on_step(rows)` hears of every step that gave `rows` rows a token, from any thread. Raises ConfigError for an unknown name.
    """
    name = spec.rollout.engine
    if name not in ENGINES:
        raise ConfigError(f"rollout.engine must be one of {', '.join(sorted(ENGINES))}, got {name!r}; change it")
    module, _, function = ENGINES[name].partition(":")
    build: BuildEngine = getattr(import_module(module), function)
    return build(spec, files, device, max_seq_len, on_step)
