"""A policy for small images: convolutions that actions and value share.

Legend: B simulators, H height, W width, P channels of an image.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_core.policies.actor_critic import ActorCritic
from rl_core.policies.base import layer


class CNNPolicy(ActorCritic):
    """An `ActorCritic` of `obs["pixels"]` [B, H, W, P] uint8. Rollout and trainer exchange the bytes; only the network sees floats."""

    observation: ClassVar[str] = "pixels"

    def __init__(
        self,
        *,
        image: Sequence[int],
        num_actions: int | None = None,
        action_dim: int | None = None,
        chunk: int = 1,
        channels: Sequence[int] = (16, 32),
        hidden: int = 128,
        initial_log_std: float = 0.0,
        temperature_train: float = 1.0,
        temperature_eval: float = 0.0,
    ) -> None:
        """`image` is (H, W, P). Each of `channels` adds a convolution of stride 2. See `ActorCritic` for the actions."""
        super().__init__(
            num_actions=num_actions,
            action_dim=action_dim,
            chunk=chunk,
            initial_log_std=initial_log_std,
            temperature_train=temperature_train,
            temperature_eval=temperature_eval,
        )
        height, width, depth = image
        layers: list[nn.Module] = []
        for width_out in channels:
            convolution = nn.Conv2d(depth, width_out, kernel_size=3, stride=2, padding=1)
            nn.init.orthogonal_(convolution.weight, 2**0.5)
            nn.init.zeros_(convolution.bias)
            layers += [convolution, nn.ReLU()]
            height, width, depth = (height + 1) // 2, (width + 1) // 2, width_out
        self.body = nn.Sequential(*layers, nn.Flatten(), layer(height * width * depth, hidden), nn.ReLU())
        self.actor, self.critic = layer(hidden, self.num_outputs, 0.01), layer(hidden, 1, 1.0)

    def networks(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and values for images [B, H, W, P]."""
        features = self.body(image_floats(observed, self.critic.weight.dtype))
        return self.actor(features), self.critic(features)


def image_floats(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images [B, H, W, P] with bytes as [B, P, H, W] in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).to(dtype) / 127.5 - 1
