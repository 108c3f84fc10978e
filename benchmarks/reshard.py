"""How fast a resharding is planned, over the tensor names of models of 7 to 200 billion parameters. Prints JSON.

    python benchmarks/reshard.py

"slices" are those of both sides; every rank plans all of them once, at its start. "publish" is the plan of an actor: whole tensors to rank 0.
"""

import itertools
import json
import time

from rl_core.weights.reshard import TensorSlice, plan_reshard

MODELS = {"7B": (32, 4096, 11008, 32000), "70B": (80, 8192, 28672, 128256), "200B": (120, 12288, 32768, 151936)}
"""Layers, width, width of the MLP, tokens."""
CUTS = {
    "fsdp 8 -> publish": (("rows", 8, 1), None),
    "fsdp 256 -> publish": (("rows", 256, 1), None),
    "tp 8 x pp 4 -> publish": (("tensor", 8, 4), None),
    "tp 8 x pp 4 -> tp 4": (("tensor", 8, 4), ("tensor", 4, 1)),
    "fsdp 256 -> tp 8": (("rows", 256, 1), ("tensor", 8, 1)),
}


def tensors(layers, width, mlp, tokens):
    """Yield (name, shape, dimension along which tensor ranks cut it)."""
    yield "model.embed_tokens.weight", (tokens, width), 0
    for index in range(layers):
        prefix = f"model.layers.{index}."
        for name in "qkv":
            yield f"{prefix}self_attn.{name}_proj.weight", (width, width), 0
        yield f"{prefix}self_attn.o_proj.weight", (width, width), 1
        yield f"{prefix}mlp.gate_proj.weight", (mlp, width), 0
        yield f"{prefix}mlp.up_proj.weight", (mlp, width), 0
        yield f"{prefix}mlp.down_proj.weight", (width, mlp), 1
        yield f"{prefix}input_layernorm.weight", (width,), None
        yield f"{prefix}post_attention_layernorm.weight", (width,), None
    yield "model.norm.weight", (width,), None
    yield "lm_head.weight", (tokens, width), 0


def slices(model, cut):
    """Return the slices of `model` cut that way: rows, or as megatron does; None = whole on rank 0."""
    kind, parts, stages = cut or ("tensor", 1, 1)
    named = list(tensors(*model))
    found = []
    for index, (name, shape, along) in enumerate(named):
        stage = index * stages // len(named)
        dim = 0 if kind == "rows" else along
        for part in range(parts):
            ranges = [(0, size) for size in shape]
            if dim is not None:
                ranges[dim] = (shape[dim] * part // parts, shape[dim] * (part + 1) // parts)
            found.append(TensorSlice(stage * parts + part, name, shape, tuple(ranges)))
    return found


def main():
    result = {}
    for (size, model), (name, (source, destination)) in itertools.product(MODELS.items(), CUTS.items()):
        sides = slices(model, source), slices(model, destination)
        began = time.perf_counter()
        plan = plan_reshard(*sides)
        seconds = time.perf_counter() - began
        result[f"{size}, {name}"] = {
            "slices": sum(map(len, sides)),
            "transfers": len(plan),
            "seconds": round(seconds, 3),
            "slices_per_second": round(sum(map(len, sides)) / seconds),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
