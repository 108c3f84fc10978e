"""The packed forward pass: the rows of a micro-batch form one sequence, and only the tokens that are trained are scored.

Legend: B rows of the micro-batch, T width of the longest, L packed tokens, P scored tokens, K candidates of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_core.actors.attention import PackedLayout
from rl_core.actors.critic import decoder_and_head
from rl_core.actors.transfer import to_device
from rl_core.algorithms.logprobs import hidden_scores, hidden_values, scored_tokens
from rl_core.api.roles import AttentionKernel
from rl_core.batching.packing import PackedRows, pack_rows, pack_values, unpack_rows

SCORE = "score_packed"
"""Name of the method that `attach_scoring` adds to a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """The model's input for one micro-batch, on the model's device."""

    rows: PackedRows
    layout: PackedLayout
    targets: Tensor
    """[P] int64: places of the tokens to score."""
    candidates: Tensor | None
    """[1, L, K] int64: further tokens to score in the place of each token; None = none."""
    width: int
    """T of the unpacked results."""

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        device: torch.device,
        *,
        candidates: Tensor | None = None,
        multiple: int = 1,
        attention: AttentionKernel = "auto",
    ) -> "PackedBatch":
        """Pack all rows of `input_ids` [B, S] (CPU), each padded to `multiple`; `mask` [B, S] bool marks the tokens to score.

        `candidates` [B, S, K] are further tokens to score. `attention` is the kernel that computes attention.
        """
        packed = pack_rows(input_ids, lengths, multiple=multiple)
        rows = {
            name: getattr(packed, name) for name in ("input_ids", "position_ids", "cu_seqlens", "lengths", "source")
        }
        # The number of tokens to score is known here, on the CPU; a device would have to be asked for it.
        extras = {"targets": scored_tokens(pack_values(mask, packed), packed.cu_seqlens)}
        if candidates is not None:
            extras["candidates"] = pack_values(candidates, packed)
        on_device = to_device(rows | extras, device)
        packed = replace(packed, **{name: on_device[name] for name in rows})
        return cls(
            rows=packed,
            layout=PackedLayout(packed.cu_seqlens, packed.padded_lengths, kernel=attention),
            targets=on_device["targets"],
            candidates=on_device.get("candidates"),
            width=input_ids.shape[1],
        )


class TokenNumbers(NamedTuple):
    """Log-probabilities, entropies and critic values per token of a forward pass.

    They are 0 where a token is not scored; None if not requested.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    candidates: Tensor | None
    """[B, T, K] log-probabilities of the candidates; the others are [B, T]."""


def attach_scoring(model: nn.Module, *, float32_head: bool = False) -> None:
    """Add the method `score_packed` to a causal LM. FSDP wrappers treat it as a second forward method.

    With `float32_head` hidden states and the weight of the output layer are converted to float32 before their product.
    """
    setattr(model, SCORE, MethodType(partial(_score_packed, float32_head=float32_head), model))


def score(
    model: nn.Module,
    batch: PackedBatch,
    *,
    temperature: float,
    log_probs: bool = True,
    entropy: bool = False,
    values: bool = False,
) -> TokenNumbers:
    """Return the requested log-probabilities, entropies and critic values of the masked tokens, each [B, T] float32.

    With the log-probabilities come those of the batch's candidates, if it has any.
    """
    packed = getattr(model, SCORE)(
        batch.rows.input_ids,
        batch.rows.position_ids,
        batch.targets,
        packed=batch.layout,
        candidates=batch.candidates,
        temperature=temperature,
        wanted=(log_probs, entropy, values),
    )
    return TokenNumbers(
        *(None if tensor is None else unpack_rows(tensor, batch.rows, width=batch.width) for tensor in packed)
    )


def _score_packed(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    targets: Tensor,
    *,
    packed: PackedLayout,
    candidates: Tensor | None,
    temperature: float,
    wanted: tuple[bool, bool, bool],
    float32_head: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return (log-probabilities, entropies, values), each [1, L] or None where it is not `wanted`, and those of candidates [1, L, K].

    A tuple of tensors that are no views: FSDP hangs its hooks on them.
    """
    log_probs = entropy = values = candidate_log_probs = hidden = None
    wants_log_probs, wants_entropy, wants_values = wanted
    if wants_log_probs:
        hidden = _hidden(model.model, input_ids, position_ids, packed)
        head = model.lm_head.weight
        scores = hidden_scores(
            hidden.float() if float32_head else hidden,
            head.float() if float32_head else head,
            input_ids,
            temperature=temperature,
            targets=targets,
            entropy=wants_entropy,
            candidates=candidates,
        )
        log_probs, entropy, candidate_log_probs = (
            None if tensor is None else tensor.clone()
            for tensor in (scores.log_probs, scores.entropy, scores.candidates)
        )
    if wants_values:
        decoder, head = decoder_and_head(model)
        if hidden is None or decoder is not model.model:
            hidden = _hidden(decoder, input_ids, position_ids, packed)
        values = hidden_values(hidden, head.weight, targets=targets).clone()
    return log_probs, entropy, values, candidate_log_probs


def _hidden(decoder: Any, input_ids: Tensor, position_ids: Tensor, packed: PackedLayout) -> Tensor:
    """Return the decoder's last hidden states [1, L, H]."""
    hidden: Tensor = decoder(
        input_ids=input_ids,
        position_ids=position_ids,
        # A 4-D mask is passed on as it is: no mask is built, and packed attention needs none.
        attention_mask=input_ids.new_empty(1, 1, 0, 0),
        use_cache=False,
        packed=packed,
    ).last_hidden_state
    return hidden
