"""The critic that is trained with a policy: a value head on the policy's decoder or on a decoder of its own.

Both are part of the policy's module, so that one wrapper shards them, one optimizer steps them and one checkpoint holds them. Their names
tell them apart: what is exported, published or kept as reference policy leaves them out.
"""

from torch import nn

HEAD = "value_head"
"""Name of the head, in the policy or in the second model."""
SEPARATE = "critic"
"""Name of the submodule with the critic's own decoder; inside it parameters are named as in the policy."""


class SecondModel(nn.Module):  # type: ignore[misc]
    """A decoder with a value head."""

    def __init__(self, decoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.model = decoder
        self.add_module(HEAD, head)


def of_critic(name: str) -> bool:
    """Return whether the parameter or buffer `name` is the critic's."""
    return not {HEAD, SEPARATE}.isdisjoint(name.split("."))


def attach_critic(model: nn.Module, hidden_size: int, decoder: nn.Module | None = None) -> None:
    """Give a causal LM a value head, on its own decoder or on `decoder`; on the meta device, to be filled with the model."""
    head = nn.Linear(hidden_size, 1, bias=False, device="meta")
    if decoder is None:
        model.add_module(HEAD, head)
    else:
        model.add_module(SEPARATE, SecondModel(decoder, head))


def decoder_and_head(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Return the critic's decoder, which may be the policy's, and its head. Raises AttributeError for a model without one."""
    holder = getattr(model, SEPARATE, model)
    return holder.model, getattr(holder, HEAD)


def has_own_decoder(model: nn.Module) -> bool:
    """Return whether the critic has a decoder of its own."""
    return hasattr(model, SEPARATE)
