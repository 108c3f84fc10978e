"""How far the run has come: what a checkpoint stores beside the ledger, and `/status` shows."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """Written by the loop alone."""

    step: int = 0
    """Last trained step."""
    version: int = 0
    """Policy version of the present weights."""
    reward: float | None = None
    """Mean reward of the last step."""
    accuracy: list[float] = field(default_factory=list)
    """Every validation so far."""

    @property
    def begun(self) -> bool:
        """Whether a step was trained or the starting weights were measured."""
        return bool(self.step or self.accuracy)

    def state_dict(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.step, self.version, self.reward = state["step"], state["version"], state["reward"]
        self.accuracy = list(state["accuracy"])
