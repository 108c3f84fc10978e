"""A Hugging Face decoder as megatron-core's GPTModel: its configuration, its layers, and its hidden states as output.

Weights are loaded later (`convert`); nothing here depends on their values. `guards` rejects models for which megatron-core has no
equivalent.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from rl_core.actors.critic import HEAD, SEPARATE
from rl_core.actors.megatron.convert import head_size
from rl_core.actors.megatron.library import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
)
from rl_core.actors.megatron.packing import PackedAttention
from rl_core.api.critic import CriticSpec


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage returns the hidden states [L, 1, H] after the final norm. Scores are computed from them in chunks.

    A critic with a decoder of its own is a second GPTModel inside it. Its hidden states travel through the pipeline stages beside the
    policy's, [L, 2, H], so that one schedule runs both.
    """

    _stage_input: Any = (None,)
    """Output of the previous stage, in a list of one as megatron sets it."""

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Receive the output of the previous stage, a tensor or a list of one."""
        self._stage_input = input_tensor if isinstance(input_tensor, list) else [input_tensor]

    def decoders(self, *, log_probs: bool, values: bool) -> "list[PolicyModel]":
        """Return the models that compute the requested scores."""
        critic = getattr(self, SEPARATE, None)
        candidates = [(self, True)] if critic is None else [(self, log_probs), (critic, values)]
        return [model for model, is_requested in candidates if is_requested]

    def forward(self, *, tokens: int, sent: int, log_probs: bool = True, values: bool = False, **inputs: Any) -> Tensor:
        """Return the hidden states that the requested scores need, those of the policy first.

        All stages must be called with the same `log_probs` and `values`. `inputs` are those of GPTModel. A tensor rank has `tokens` of the
        micro-batch. Between stages hidden states have the length `sent`, which is that of the longest micro-batch: stages that expect
        it need not tell each other shapes, for which they would wait for their devices.
        """
        running = self.decoders(log_probs=log_probs, values=values)
        (stage_input,) = self._stage_input
        decoder_inputs = [stage_input] * len(running) if stage_input is None else stage_input[:tokens].split(1, dim=1)
        states = [
            model._run(decoder_input, inputs) for model, decoder_input in zip(running, decoder_inputs, strict=True)
        ]
        hidden = states[0] if len(states) == 1 else torch.cat(states, dim=1)
        return hidden if self.post_process else pad(hidden, (0, 0, 0, 0, 0, sent - tokens))

    def _run(self, decoder_input: Tensor | None, inputs: dict[str, Any]) -> Tensor:
        self.decoder.set_input_tensor(decoder_input)
        hidden: Tensor = super().forward(**inputs)
        return hidden

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **inputs: Any) -> tuple[Any, ...]:
        """Return what GPTModel does, with the rotary angles [L, 1, D] of the packed tokens in place of those of all positions."""
        embedded, angles, *others = super()._preprocess(input_ids, position_ids, **inputs)
        return embedded, angles[position_ids[0], 0], *others

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer's weight."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    @property
    def head_weight(self) -> Tensor:
        """Return the weight [1, H] of the critic's value head. Only on the last stage of a job with a critic."""
        weight: Tensor = getattr(getattr(self, SEPARATE, self), HEAD).weight
        return weight


class Norm(nn.RMSNorm):  # type: ignore[misc]
    """RMSNorm that megatron builds; its own wrapper refuses sequence parallel."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # megatron sums such gradients over the tensor ranks


def transformer_config(
    hf: Any, *, architecture: str, dtype: torch.dtype, rotary_factor: float = 1.0, **settings: Any
) -> Any:
    """Return megatron's configuration for the transformers config `hf`. `settings` adds those of the parallel layout and the device.

    `rotary_factor` multiplies the cosines and sines of the rotary embedding.
    """
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_size(hf),
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=architecture == "Qwen3ForCausalLM",
        add_qkv_bias=architecture == "Qwen2ForCausalLM",
        add_bias_linear=False,
        activation_func=silu,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        perform_initialization=False,
        cuda_graph_scope=[],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Fused kernels of Apex and Transformer Engine, which the images do not have.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        **settings,
    )
    if rotary_factor != 1.0:
        # megatron computes its factor as (0.1 m ln s + 1) / (0.1 a ln s + 1), with scaling factor s, mscale m and mscale_all_dim a.
        config.yarn_rotary_scaling_factor = math.e
        config.yarn_mscale, config.yarn_mscale_all_dim = 10.0 * (rotary_factor - 1.0), 0.0
    return config


def build_model(
    hf: Any,
    config: Any,
    *,
    vocabulary: int,
    rotary_frequencies: Tensor,
    critic: CriticSpec | None = None,
    **place: Any,
) -> PolicyModel:
    """Return the part of the model that one pipeline stage holds, with weights of zero.

    `vocabulary` is the number of embedding rows with padding. `rotary_frequencies` [D / 2] are those of the transformers model, so that
    every scaling of them is the same here. `place` contains pre_process, post_process and vp_stage as GPTModel takes them.
    """

    def decoder(*, tied: bool) -> PolicyModel:
        model = PolicyModel(
            config=config,
            transformer_layer_spec=_block_spec(config, place.get("vp_stage")),
            vocab_size=vocabulary,
            max_sequence_length=hf.max_position_embeddings,
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            **place,
        )
        model.rotary_pos_emb.inv_freq = rotary_frequencies.to(model.rotary_pos_emb.inv_freq)
        return model

    model = holder = decoder(tied=bool(hf.tie_word_embeddings))
    if critic is not None and critic.separate:
        holder = decoder(tied=False)
        holder.output_layer = None
        model.add_module(SEPARATE, holder)
    if critic is not None and holder.post_process:
        # Every tensor rank has the whole head and the same hidden states. The head's gradients are therefore equal and are not summed.
        holder.add_module(HEAD, nn.Linear(hf.hidden_size, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def rotary_embedding(template: Any) -> tuple[Tensor, float]:
    """Return the rotary frequencies [D / 2] of a transformers model, including its scaling, and the factor of cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = template.model.rotary_emb
    if rotary.rope_type == "default":
        frequencies, factor = rotary.compute_default_rope_parameters(template.config, device="cpu")
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rotary.rope_type](template.config, "cpu")
    return frequencies, factor


def _block_spec(config: Any, vp_stage: int | None) -> Any:
    """Return what this stage's decoder is built of."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm)
