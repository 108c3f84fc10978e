"""A vision-language-action policy: a Hugging Face vision-language model that writes a chunk of actions as tokens.

    image tokens | state | words of the instruction | tokens of the actions

The last `bins` ids of the vocabulary stand for equal parts of [-1, 1]: each number of an action is one token, chosen after all tokens before
it. Source: Kim et al., "OpenVLA: An Open-Source Vision-Language-Action Model" (2024), 3.2.

Legend: B simulators, C actions of a chunk, D tokens of an action, N = C * D, W words, H, width of the model; K bins.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_core.messages.embodied import Mode
from rl_core.policies.base import Policy, discrete_scores, evaluation_scale, layer, sample_discrete
from rl_core.policies.cnn import image_floats


class VLAPolicy(Policy):
    """Sees `obs["pixels"]` [B, height, width, 3] uint8, `obs["states"]` [B, S] where it has a state, and `obs["instruction"]` [B, W] ids."""

    def __init__(
        self,
        *,
        model: Mapping[str, Any],
        action_dim: int,
        chunk: int = 1,
        bins: int = 64,
        state_size: int = 0,
        instruction: Sequence[int] = (),
        temperature_train: float = 1.0,
        temperature_eval: float = 0.0,
    ) -> None:
        """Build a vision-language model with random weights.

        `model` is the configuration of a model of the LLaVA family, as in its config.json: vision_config, text_config and what connects
        them. `instruction` has the ids of an instruction where the simulators give none. `temperature_train` divides the logits in rollouts
        and in training; `temperature_eval` does in evaluations, where 0 means that the most likely tokens are taken. Raises ValueError when
        the vocabulary has fewer than `bins` ids.
        """
        from transformers import AutoConfig, AutoModelForImageTextToText

        super().__init__()
        self.temperature = temperature_train
        self._eval_scale = evaluation_scale(temperature_train, temperature_eval)
        settings = dict(model)
        config = AutoConfig.for_model(settings.pop("model_type", "llava"), **settings)
        vocabulary = config.text_config.vocab_size
        if not 2 <= bins <= vocabulary:
            raise ValueError(f"bins must be in [2, {vocabulary}], the size of the vocabulary, got {bins}; lower it")
        self.vlm = AutoModelForImageTextToText.from_config(config)
        self.chunk, self.action_dim, self.bins = chunk, action_dim, bins
        self.first_action = vocabulary - bins
        """Id of the first action token."""
        self._no_split_modules = self.vlm._no_split_modules  # FSDP gathers the weights of one of these at a time
        width = config.text_config.hidden_size
        self.state = layer(state_size, width) if state_size else None
        self.value = layer(width, 1, 1.0)
        self.register_buffer("words", torch.tensor(list(instruction), dtype=torch.int64), persistent=False)

    def predict(self, obs: dict[str, Tensor], mode: Mode = "train") -> tuple[Tensor, dict[str, Any]]:
        """Return actions [B, C, D] in (-1, 1); see `Policy.predict`. The tokens are chosen one after the other, with a KV cache."""
        observed: dict[str, Tensor] = {name: obs[name] for name in ("pixels", "states", "instruction") if name in obs}
        answer = self._language(self._prompt(observed), use_cache=True)
        hidden = answer.last_hidden_state[:, -1]
        values = self.value(hidden)
        tokens: list[Tensor] = []
        log_probs: list[Tensor] = []
        for index in range(self.chunk * self.action_dim):
            if index:
                answer = self._language(
                    self._embed(tokens[-1][:, None]), use_cache=True, past_key_values=answer.past_key_values
                )
                hidden = answer.last_hidden_state[:, -1]
            token, log_prob = sample_discrete(self._logits(hidden), mode, eval_scale=self._eval_scale)
            tokens.append(token)
            log_probs.append(log_prob)
        token_ids = torch.stack(tokens, dim=1)
        shape = (len(token_ids), self.chunk, self.action_dim)
        actions = ((token_ids + 0.5) * (2 / self.bins) - 1).view(shape)
        return actions, {
            "prev_logprobs": torch.stack(log_probs, dim=1).view(shape),
            "prev_values": values,
            "forward_inputs": observed | {"tokens": token_ids},
        }

    def forward_train(self, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """Return log-probabilities and entropies of tokens [B, C, D] and values [B, 1]; see `Policy.forward_train`."""
        tokens, prompt = inputs["tokens"], self._prompt(inputs)
        sequence = torch.cat([prompt, self._embed(tokens[:, :-1])], dim=1)
        hidden = self._language(sequence, use_cache=False).last_hidden_state[:, prompt.shape[1] - 1 :]
        log_probs, entropy = discrete_scores(self._logits(hidden), tokens)
        shape = (len(tokens), self.chunk, self.action_dim)
        return {"log_probs": log_probs.view(shape), "entropy": entropy.view(shape), "values": self.value(hidden[:, 0])}

    def _prompt(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings [B, L, H] of the tokens before the actions."""
        dtype = self.value.weight.dtype
        features = self.vlm.model.get_image_features(pixel_values=image_floats(obs["pixels"], dtype)).pooler_output
        parts = [features if isinstance(features, Tensor) else torch.stack(list(features))]
        if self.state is not None:
            parts.append(self.state(obs["states"].to(dtype))[:, None])
        words = obs.get("instruction", self.words.expand(len(parts[0]), -1))
        return torch.cat([*parts, self.vlm.get_input_embeddings()(words)], dim=1)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., H] of action tokens, given as numbers in [0, K)."""
        embedded: Tensor = self.vlm.get_input_embeddings()(tokens + self.first_action)
        return embedded

    def _language(self, embeddings: Tensor, **options: Any) -> Any:
        return self.vlm.model.language_model(inputs_embeds=embeddings, **options)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the action tokens [..., K]."""
        logits: Tensor = self.vlm.lm_head(hidden)[..., self.first_action :]
        return logits / self.temperature if self.temperature != 1.0 else logits
