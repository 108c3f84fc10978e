"""Part of gpu.py: a model's hand-over from a process to another that shares its device, by each way, beside a copy on the device.

python benchmarks/_gpu_weights.py '{"device": "cuda:0", "shapes": {...}}'     the receiver's process
"""

import asyncio
import json
import statistics
import subprocess
import sys

import torch
from _gpu_world import World, rate

TENSORS = 49
EPOCHS = {"zmq": 1, "ipc": 2}
"""WeightTransport -> epoch of its publisher."""


def hand_over(world: World) -> dict:
    """Return GB/s and pause of each way, from OFFER to ACK and with the copy before it."""
    words = (1 << 18 if world.small else 1 << 29) // TENSORS // 256 * 256
    shapes = {f"layer{index}": [words] for index in range(TENSORS)}
    command = [sys.executable, __file__, json.dumps({"device": world.device, "shapes": shapes})]
    receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found: dict = {"bytes": 2 * words * TENSORS}
    try:
        about = json.loads(receiver.stdout.readline())
        weights = {
            name: torch.randn(shape, dtype=torch.bfloat16, device=world.device) for name, shape in shapes.items()
        }
        for transport in EPOCHS:
            try:
                found[transport] = _way(world, transport, weights, about)
            except Exception as error:
                found[transport] = {"error": f"{type(error).__name__}: {error}"[:400]}
        also = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        copied = world.median(lambda: [also[name].copy_(tensor) for name, tensor in weights.items()])
        found["copy_on_device_gb_per_second"] = rate(found["bytes"], copied)
    finally:
        receiver.stdin.close()
        receiver.wait(30)
    return found


def _way(world: World, transport: str, weights: dict, about: dict) -> dict:
    from rl_core.api.job import RLJobSpec
    from rl_core.messages.weights import ReceiverAddress
    from rl_core.weights.manifest import checksum
    from rl_core.weights.publisher import WeightPublisher
    from tests.weight_samples import StateSource

    spec = RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    # Not by the schema, which refuses ipc for a CPU: there shared memory stands in for the device's.
    spec = spec.model_copy(update={"weights": spec.weights.model_copy(update={"transport": transport})})
    publisher = WeightPublisher(spec, EPOCHS[transport], device=world.device, device_uuid=_uuid(world.device))
    receiver = ReceiverAddress(name="rollout:0", address=about["address"], host_token=about["host_token"])
    reports, nbytes = [], sum(tensor.nbytes for tensor in weights.values())
    try:
        for version in range(1, 3 if world.small else 6):
            for tensor in weights.values():
                tensor.add_(0.25)
            world.synchronize()
            reports.append(publisher.publish(version, StateSource(weights), [receiver], 1))
        client = publisher._client(receiver)
        theirs = client.call_sync("sums", timeout=60)
        ours = {name: [hex(part) for part in checksum(tensor)] for name, tensor in weights.items()}
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


def _uuid(device: str) -> str | None:
    from rl_core.workers.devices import device_uuids

    return None if device == "cpu" else device_uuids(("0",))[0]


class Engine:
    """Takes weights as tensors on its device."""

    def __init__(self, shapes: dict[str, list[int]], device: str) -> None:
        self.weights = {n: torch.zeros(shape, dtype=torch.bfloat16, device=device) for n, shape in shapes.items()}

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


def serve() -> None:
    from rl_core.transports import tokens
    from rl_core.transports.rpc import RpcServer
    from rl_core.weights.manifest import checksum
    from rl_core.weights.receiver import WeightReceiver

    options = json.loads(sys.argv[1])
    engine = Engine(options["shapes"], options["device"])
    receiver = WeightReceiver(None, None, 0, engine, device=options["device"], device_uuid=_uuid(options["device"]))
    receiver.warm_up()

    async def sums() -> dict[str, list[str]]:
        return {name: [hex(part) for part in checksum(tensor)] for name, tensor in engine.weights.items()}

    server = RpcServer("tcp://127.0.0.1:0", {"sums": sums, **receiver.handlers()}).start()
    print(json.dumps({"address": server.address, "host_token": tokens.host_token()}), flush=True)
    sys.stdin.read()
    server.close()
    asyncio.run(receiver.close())


if __name__ == "__main__":
    serve()
