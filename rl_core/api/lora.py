"""`spec.model.lora`: settings of low-rank adapters."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec
from rl_core.api.cel import Cel

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer of a decoder layer: of attention (q, k, v, o) or of the feed-forward part (gate, up, down)."""


class LoraSpec(Spec):
    """Low-rank adapters (LoRA) that are trained in place of the model's weights: W x + alpha / rank B A x, with W frozen."""

    rank: int = Field(16, ge=1, le=1024)
    """Rank of each adapter: A is [rank, inputs], B is [outputs, rank]."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout rate of the adapters' inputs in training; needs actor.dropout."""
    targets: Annotated[list[Target], Field(min_length=1, max_length=7)] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Linear layers that get an adapter."""
    layers: Annotated[list[Annotated[int, Field(ge=0, lt=1024)]], Field(min_length=1, max_length=1024)] | None = None
    """Numbers of the decoder layers that get adapters, from 0; null = all."""

    @property
    def scale(self) -> float:
        """Return the factor of an adapter's output."""
        return self.alpha / self.rank


def absent_layers(lora: LoraSpec | None, *, layers: int) -> Iterator[str]:
    """Yield a message when the adapters are for decoder layers that a model of `layers` layers does not have."""
    if absent := sorted({layer for layer in (lora and lora.layers) or [] if layer >= layers}):
        yield f"model.lora.layers must be below {layers}, the number of the model's layers, got {absent}; remove them"


DROPOUT_IS_ON = Cel(
    holds="self.model.?lora.?dropout.orValue(0.0) == 0.0 || $actor.dropout",
    refusal="model.lora.dropout needs actor.dropout true, got %s and false; set it or remove the dropout",
    values=("self.model.?lora.?dropout.orValue(0.0)",),
    field="model",
)
"""CEL of `idle_dropout`."""


def idle_dropout(lora: LoraSpec | None, *, dropout: bool) -> Iterator[str]:
    """Yield a message when the adapters have a dropout rate and `dropout`, the trainer's switch, is off."""
    if lora is not None and lora.dropout > 0 and not dropout:
        yield f"model.lora.dropout needs actor.dropout true, got {lora.dropout:g} and false; set it or remove the dropout"
