"""Trains a policy that acts in simulators under FSDP1 or FSDP2: `forward_train` of the policy takes the place of packed tokens.

Legend: B rows, each a decision; C actions of a chunk, D tokens or dimensions of an action, S numbers of a row that the loss sees.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.actors import hf
from rl_core.actors.backend import DetachedScores, Proceed, Scores
from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.rows import StepRows
from rl_core.actors.transfer import to_device
from rl_core.policies.folder import load_policy

FORWARD = "forward_train"
"""Method of a policy that the trainer calls; FSDP treats it as a forward method."""
HIDDEN_SIZE, LONGEST = 64, 2**30
"""Stand-ins for the sizes of a language model: all rows of a step cost the same, and their length is not limited."""


class PolicyModelManager(FSDPModelManager):
    """One rank's part of a policy in training."""

    def model_provider_func(self) -> nn.Module:
        """Return the policy of `model.path`. Raises ConfigError for a folder that describes none."""
        return load_policy(self.cfg.model.path, seed=self.cfg.algorithm.seed)

    @property
    def model_config(self) -> Any:
        """Sizes that the training step asks for."""
        return SimpleNamespace(hidden_size=HIDDEN_SIZE, max_position_embeddings=LONGEST)

    def _build(self) -> nn.Module:
        model = self.model_provider_func().to(self.dtype).float()
        self._set_modes(model)
        aliases = hf.tied_names(model)
        # The value head is published too: rollouts need the values of what they see.
        self.sync_names = [(name, aliases.get(name)) for name in hf.stored_names(model, {})]
        return self.strategy.wrap(model, device=self.compute_device, aliases=aliases, methods=[FORWARD])

    def _models(self) -> list[list[nn.Parameter]]:
        """Return the parameters as those of one model: the gradients of a policy are clipped together, those of its values included."""
        return [[parameter for group in self.optimizer.param_groups for parameter in group["params"]]]

    def set_global_step(self, global_step: int) -> None:
        """Set the last trained step. Calls `set_global_step` of the policy if it has that method. Raises as `ModelManager.set_global_step`."""
        super().set_global_step(global_step)
        hook = getattr(getattr(self, "model", None), "set_global_step", None)
        if callable(hook):
            hook(global_step)


class PolicyBackend(FSDPBackend):
    """The train backend of policies."""

    def __init__(self, manager: PolicyModelManager, *, level: str) -> None:
        """`level` (chunk, action or token) says what one number of a row stands for."""
        super().__init__(manager)
        self._level = level

    def _scores(self, rows: StepRows) -> Scores:
        manager = self.manager
        manager.residency.require_loaded("a forward pass")
        outputs = manager.model.forward_train(to_device(rows.inputs, manager.compute_device))
        log_probs, entropy = (by_level(outputs[name].float(), self._level) for name in ("log_probs", "entropy"))
        values = outputs.get("values")
        if values is not None:
            values = values.float().reshape(len(log_probs), -1)
            if values.shape != log_probs.shape:
                values = values[:, :1].expand_as(log_probs)
        return Scores(log_probs, entropy, values)

    def score_rows(
        self, micro_batches: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[DetachedScores]:
        """Return the requested scores of each micro-batch. See TrainBackend."""
        scored = []
        for rows in micro_batches:
            proceed()
            with torch.no_grad():
                scores = self._scores(rows)
            scored.append(DetachedScores(scores.log_probs if log_probs else None, scores.values if values else None))
        return DetachedScores.on_cpu(scored)


def by_level(values: Tensor, level: str) -> Tensor:
    """Return numbers per token or dimension [B, C, D] as [B, S]: summed per chunk, per action, or as they are."""
    if level == "chunk":
        rows = values.flatten(1)
        return rows if rows.shape[1] == 1 else rows.sum(dim=1, keepdim=True)
    return values.sum(dim=2) if level == "action" else values.flatten(1)
