"""Which decoder layers store activations for a backward pass.

With adapters, gradients flow down to the lowest layer that has any, and in it to the first adapter. Layers above it store what the gradients of
their inputs need, whether they have adapters or not. Layers below it store nothing, except in later pipeline stages, which send gradients to
the stage before, and with gradient checkpointing of Megatron.
"""

from dataclasses import dataclass

from rl_core.api.job import RLJobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLayers:
    """The decoder layers of a pipeline stage that store activations.

    Each number is a number of layers times the number of micro-batches in flight, so it need not be whole.
    """

    trained: float
    """Layers with adapters except the one counted in `lowest`; all layers without `model.lora`."""
    frozen: float
    """Layers without adapters that store activations because gradients flow through them."""
    lowest: float = 0
    """The lowest layer with adapters, if it stores activations only from its first adapter on."""


def adapted_layers(job: RLJobSpec, layers: int) -> frozenset[int]:
    """Return the numbers, from 0, of the layers that have adapters, of `layers` in all; none without `model.lora`."""
    lora = job.model.lora
    if lora is None:
        return frozenset()
    return frozenset(range(layers) if lora.layers is None else lora.layers)


def kept_layers(job: RLJobSpec, layers: int) -> list[KeptLayers]:
    """Return one `KeptLayers` for each pipeline stage, for a model of `layers` decoder layers.

    With virtual stages, returns only that of the first stage, which stores the most, counted as if every layer stored activations.
    """
    parallel, lora = job.actor.parallel, job.model.lora
    trained = frozenset(range(layers)) if lora is None else adapted_layers(job, layers)
    if parallel.virtual_pipeline:
        # The first stage has some more micro-batches under way than there are stages, each in its share of the layers.
        passes = 1 + (parallel.pipeline - 1) / (parallel.pipeline * parallel.virtual_pipeline)
        return [KeptLayers(trained=passes * len(trained), frozen=passes * (layers - len(trained)))]
    layers_per_stage = layers // parallel.pipeline
    counts = []
    for stage in range(parallel.pipeline):
        first_layer, end_layer = stage * layers_per_stage, (stage + 1) * layers_per_stage
        trained_here = [layer for layer in trained if first_layer <= layer < end_layer]
        # Other stages send gradients to the one before. Megatron recomputes only layers whose inputs want gradients.
        to_inputs = stage > 0 or (job.actor.backend == "megatron" and job.actor.gradient_checkpointing)
        frozen = end_layer - (first_layer if to_inputs else min(trained_here, default=end_layer)) - len(trained_here)
        # The single parameter of a layer under FSDP1 wants a gradient, and so does all that is computed with it.
        partly = bool(trained_here) and not to_inputs and lora is not None and job.actor.backend != "fsdp1"
        passes = parallel.pipeline - stage
        stage_counts = KeptLayers(
            trained=passes * (len(trained_here) - partly), frozen=passes * frozen, lowest=passes * partly
        )
        counts.append(stage_counts)
    return counts
