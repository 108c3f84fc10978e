"""The critic that is trained with a policy: a value head on the policy's decoder, or on a decoder of its own.

Both are submodules of the policy, so that one wrapper shards them, one optimizer updates them and one checkpoint contains them. They are
recognized by their names. What is exported, published or kept as the reference policy leaves them out.
"""

from torch import nn

HEAD = "value_head"
"""Name of the head, in the policy or in the second model."""
SEPARATE = "critic"
"""Name of the submodule with the critic's own decoder; inside it parameters are named as in the policy."""


class CriticModel(nn.Module):  # type: ignore[misc]
    """A critic with its own decoder and a value head."""

    def __init__(self, decoder: nn.Module, head: nn.Linear) -> None:
        """Combine `decoder` with the linear layer `head`, which maps hidden states to values."""
        super().__init__()
        self.model = decoder
        self.add_module(HEAD, head)


def is_critic_name(name: str) -> bool:
    """Return whether the parameter or buffer called `name` belongs to the critic."""
    return not {HEAD, SEPARATE}.isdisjoint(name.split("."))


def attach_critic(model: nn.Module, hidden_size: int, decoder: nn.Module | None = None) -> None:
    """Add a value head to a causal LM on the meta device, on the policy's own decoder (`decoder` None) or on `decoder`."""
    head = nn.Linear(hidden_size, 1, bias=False, device="meta")
    if decoder is None:
        model.add_module(HEAD, head)
    else:
        model.add_module(SEPARATE, CriticModel(decoder, head))


def decoder_and_head(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Return the critic's decoder, which may be the policy's, and its value head. Raises AttributeError when there is no critic."""
    holder = getattr(model, SEPARATE, model)
    return holder.model, getattr(holder, HEAD)


def has_own_decoder(model: nn.Module) -> bool:
    """Return whether the critic has a decoder of its own."""
    return hasattr(model, SEPARATE)
