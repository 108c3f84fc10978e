"""A part of gpu.py: syncs of adapters (LoRA) alone beside syncs of whole versions, in turns, to an engine in a process of its own."""

import statistics

import _gpu_runs as runs
import torch
from _gpu_weights import model_weights, receiving, uuid_of
from _gpu_world import World


def adapters(world: World) -> dict:
    """Return bytes and seconds of both from OFFER to the ACK of an engine that serves, by engine. SGLang where there is a device for it."""
    found: dict = {}
    for engine in ("hf", "sglang") if world.cuda else ("hf",):
        try:
            found[engine] = _syncs(world, engine)
        except Exception as error:
            found[engine] = {"error": f"{type(error).__name__}: {error}"[:400]}
    return found


def _syncs(world: World, engine: str) -> dict:
    from rl_core.messages.weights import ReceiverAddress
    from rl_core.rollouts.adapters import adapter_shapes
    from rl_core.weights.adapters import AdapterSource
    from rl_core.weights.publisher import WeightPublisher
    from tests.weight_samples import StateSource

    lora = {"rank": 2 if world.small else 16, "alpha": 16.0}
    spec = runs.job(world, engine=engine, lora=lora)
    base = model_weights(world)
    shapes = {name: (tuple(tensor.shape), "float32") for name, tensor in base.items()}
    over = {
        name: torch.randn(shape, device=world.device) * 0.01
        for name, (shape, _) in adapter_shapes(spec.model.lora, shapes).items()
    }
    reports: dict[str, list] = {"whole": [], "adapters": []}
    options = {
        "device": world.device,
        "small": world.small,
        "folder": str(world.folder),
        "engine": engine,
        "lora": lora,
    }
    with receiving(options) as about:
        receiver = ReceiverAddress(name="rollout:0", address=about["address"], host_token=about["host_token"])
        publisher = WeightPublisher(spec, 1, device=world.device, device_uuid=uuid_of(world.device))
        try:
            for turn in range(2 if world.small else 6):
                sources = {
                    "whole": StateSource({**base, **over}),
                    "adapters": AdapterSource(over, bucket_bytes=spec.weights.bucket_bytes),
                }
                for way, (name, source) in enumerate(sources.items()):
                    for tensor in (base if name == "whole" else over).values():
                        tensor.add_(0.25)
                    world.synchronize()
                    reports[name].append(publisher.publish(2 * turn + way + 1, source, [receiver], 1))
        finally:
            publisher.close()
    figures = {
        name: {
            "bytes": of[-1].bytes,
            **{key: round(statistics.median(getattr(one, key) for one in of[1:]), 5) for key in SECONDS},
        }
        for name, of in reports.items()
    }
    whole, alone = figures["whole"], figures["adapters"]
    return {
        **figures,
        "sent_alone": all(report.patched for report in reports["adapters"]),
        "sent_whole": not any(report.patched for report in reports["whole"]),
        **{f"adapters_over_whole_{key}": round(alone[key] / whole[key], 4) for key in whole},
    }


SECONDS = ("seconds", "sync_seconds", "pause_seconds")
"""Of a publish, from OFFER to the last ACK, and in which the engine generates nothing."""
