"""Parts of gpu.py: a model's hand-over from a process to another, by each way, beside a copy on the device.

python benchmarks/_gpu_weights.py '{"device": "cuda:0", "shapes": {...}}'                the receiver's process
python benchmarks/_gpu_weights.py '{"device": "cuda:0", "small": false, "folder": ...}'  the same, with a real engine,
                                                                                         "engine": "hf" or "sglang", "lora": null or {...}
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import _gpu_runs as runs
import torch
from _gpu_world import World, rate, sizes

TENSORS = 49
EPOCHS = {"zmq": 1, "ipc": 2, "gloo": 3, "nccl": 4}
"""WeightTransport -> epoch of its publisher."""


def hand_over(world: World) -> dict:
    """Return GB/s and pause of each way, from OFFER to ACK and with the copy before it."""
    words = (1 << 18 if world.small else 1 << 29) // TENSORS // 256 * 256
    shapes = {f"layer{index}": [words] for index in range(TENSORS)}
    weights = {name: torch.randn(shape, dtype=torch.bfloat16, device=world.device) for name, shape in shapes.items()}
    found = _ways(world, {"device": world.device, "shapes": shapes}, weights, ("zmq", "ipc"))
    return found | _copy(world, weights) | {"unused_handles_freed": _frees_unused_handles(world)}


def _frees_unused_handles(world: World) -> bool | None:
    """Return whether a buffer is freed although nobody has mapped its handles; None on a CPU, where nothing would keep it."""
    from rl_core.weights.device_buffer import DeviceBuffer

    if not world.cuda:
        return None
    before, buffer = torch.cuda.memory_allocated(), DeviceBuffer(optional=False)
    buffer.allocate(1 << 24, world.device)
    buffer.free(unused=[buffer.handle(), buffer.handle()])
    return torch.cuda.memory_allocated() == before


def engine_loads(world: World) -> dict:
    """Return the same of the ways into an SGLang engine, whose own processes read the version; by NCCL where there are two GPUs."""
    weights = model_weights(world)
    options = {"device": world.device, "small": world.small, "folder": str(world.folder), "engine": "sglang"}
    found = _ways(world, options, weights, ("zmq", "ipc") if world.cuda else ("zmq", "ipc", "gloo"))
    if world.cuda and torch.cuda.device_count() > 1:
        found |= _ways(world, options | {"device": "cuda:1"}, weights, ("nccl",))
    return found | _copy(world, weights)


def model_weights(world: World) -> dict[str, torch.Tensor]:
    """Return random weights of the model of all parts, on the device and in the type of its engines."""
    from rl_core.rollouts.hf.config import DecoderConfig
    from rl_core.rollouts.hf.weights import DecoderWeights

    shapes = DecoderWeights(DecoderConfig.from_dict(sizes(world)), device="meta").names_and_shapes()
    dtype = getattr(torch, runs.job(world).model.dtype)
    return {name: torch.randn(shape, dtype=dtype, device=world.device) for name, shape in shapes.items()}


@contextlib.contextmanager
def receiving(options: dict) -> Iterator[dict]:
    """Run a receiver with `options` in a process of its own; yield where it is, as `serve` prints it."""
    command = [sys.executable, __file__, json.dumps(options)]
    receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(next(line for line in receiver.stdout if line.startswith('{"address"')))
    finally:
        receiver.stdin.close()
        receiver.wait(30)


def _ways(world: World, options: dict, weights: dict, transports: tuple[str, ...]) -> dict:
    """Return the figures of each way to one receiver."""
    found: dict = {}
    with receiving(options) as about:
        for transport in transports:
            try:
                found[transport] = _way(world, transport, weights, about)
            except Exception as error:
                found[transport] = {"error": f"{type(error).__name__}: {error}"[:400]}
    return found


def _copy(world: World, weights: dict) -> dict:
    """Return how fast the device copies the model."""
    also = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    copied = world.median(lambda: [also[name].copy_(tensor) for name, tensor in weights.items()])
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    return {"bytes": nbytes, "copy_on_device_gb_per_second": rate(nbytes, copied)}


def _way(world: World, transport: str, weights: dict, about: dict) -> dict:
    from rl_core.api.job import RLJobSpec
    from rl_core.messages.weights import ReceiverAddress
    from rl_core.weights.manifest import checksum
    from rl_core.weights.publisher import WeightPublisher
    from tests.weight_samples import StateSource

    spec = RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    # Not by the schema, which refuses ipc for a CPU: there shared memory stands in for the device's.
    spec = spec.model_copy(update={"weights": spec.weights.model_copy(update={"transport": transport})})
    publisher = WeightPublisher(spec, EPOCHS[transport], device=world.device, device_uuid=uuid_of(world.device))
    receiver = ReceiverAddress(name="rollout:0", address=about["address"], host_token=about["host_token"])
    reports, nbytes = [], sum(tensor.nbytes for tensor in weights.values())
    try:
        for version in range(1, 3 if world.small else 6):
            for tensor in weights.values():
                tensor.add_(0.25)
            world.synchronize()
            reports.append(publisher.publish(version, StateSource(weights), [receiver], 1))
        client = publisher._client(receiver)
        theirs = client.call_sync("held", timeout=60)
        ours = about["proof"] or {name: [hex(part) for part in checksum(tensor)] for name, tensor in weights.items()}
    finally:
        publisher.close()
    medians = {
        name: statistics.median(getattr(one, name) for one in reports[1:])
        for name in ("seconds", "copy_seconds", "sync_seconds", "apply_seconds", "pause_seconds")
    }
    return {
        "carried_by": reports[-1].transport,
        "bit_equal": theirs == ours,
        "sync_gb_per_second": rate(nbytes, medians["sync_seconds"]),
        "publish_gb_per_second": rate(nbytes, medians["seconds"]),
        **{name: round(value, 4) for name, value in medians.items()},
    }


def uuid_of(device: str) -> str | None:
    from rl_core.workers.devices import device_uuids

    return None if device == "cpu" else device_uuids((device.partition(":")[2] or "0",))[0]


class Engine:
    """Takes weights as tensors on its device."""

    proof = ""

    def __init__(self, shapes: dict[str, list[int]], device: str) -> None:
        self.weights = {n: torch.zeros(shape, dtype=torch.bfloat16, device=device) for n, shape in shapes.items()}
        self.weight_target = self

    async def prepare(self, deadline: float) -> None:
        pass

    def names_and_shapes(self):
        return {name: (tuple(tensor.shape), "bfloat16") for name, tensor in self.weights.items()}

    def load(self, tensors, version: int) -> None:
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)
        if any(tensor.is_cuda for tensor in self.weights.values()):
            torch.cuda.synchronize()

    async def resume(self, version: int, digest: str) -> None:
        pass

    def held(self):
        """Return the checksums of its tensors."""
        from rl_core.weights.manifest import checksum

        return {name: [hex(part) for part in checksum(tensor)] for name, tensor in self.weights.items()}

    def close(self) -> None:
        pass


class RealEngine:
    """The engine `hf` or `sglang` of the model of all parts. It says itself whether its parameters are those of the manifest."""

    def __init__(self, device: str, small: bool, folder: str, engine: str, lora: dict | None = None) -> None:
        from rl_core.rollouts.engine import PROVEN
        from rl_core.rollouts.hf.rollout_engine import HFRolloutEngine
        from rl_core.rollouts.sglang.rollout_engine import SGLangRolloutEngine

        world = World(device, small, Path(folder))
        kind = {"hf": HFRolloutEngine, "sglang": SGLangRolloutEngine}[engine]
        spec = runs.job(world, engine=engine, lora=lora)
        self.engine = kind.build(spec, runs.files(world), device, 256, lambda tokens: None, lambda stage: None)
        self.weight_target, self.proof, self.close = self.engine.weight_target, PROVEN, self.engine.close

    def held(self) -> str:
        return self.engine.weights_proof


def serve() -> None:
    from rl_core.transports import tokens
    from rl_core.transports.rpc import RpcServer
    from rl_core.weights.receiver import WeightReceiver

    options = json.loads(sys.argv[1])
    engine, device = Engine(**options) if "shapes" in options else RealEngine(**options), options["device"]
    uuids = () if device == "cpu" else (uuid_of(device),)
    receiver = WeightReceiver(None, None, 0, engine.weight_target, device=device, device_uuids=uuids)
    receiver.warm_up()

    async def held():
        return engine.held()

    server = RpcServer("tcp://127.0.0.1:0", {"held": held, **receiver.handlers()}).start()
    about = {"address": server.address, "host_token": tokens.host_token(), "proof": engine.proof}
    print(json.dumps(about), flush=True)
    sys.stdin.read()
    server.close()
    asyncio.run(receiver.close())
    engine.close()


if __name__ == "__main__":
    serve()
