"""The progress of the run: step, policy version, reward and accuracy. Checkpoints store it and `/status` shows it."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RunProgress:
    """Changed by the loop only."""

    step: int = 0
    """Last trained step."""
    version: int = 0
    """Policy version of the current weights."""
    reward: float | None = None
    """Mean reward of the last step; None before the first one."""
    accuracy: list[float] = field(default_factory=list)
    """Accuracy of every validation so far, 0 to 1."""

    @property
    def begun(self) -> bool:
        """Whether a step was trained or the starting weights were measured."""
        return bool(self.step or self.accuracy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON-able values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.step, self.version, self.reward = state["step"], state["version"], state["reward"]
        self.accuracy = list(state["accuracy"])
