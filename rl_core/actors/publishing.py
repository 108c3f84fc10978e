"""Opens the weight publisher of an actor, and prepares what the other ranks do for it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rl_core.actors.device_copies import DeviceCopies
from rl_core.actors.ranks import Ranks
from rl_core.actors.source import GatheredSource
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import ReceiverAddress
from rl_core.transports import tokens
from rl_core.transports.sockets import split_address
from rl_core.weights.adapters import AdapterSource
from rl_core.weights.device_buffer import Handle
from rl_core.weights.weight_transport import Place, maps_devices
from rl_core.workers.worker import Worker

if TYPE_CHECKING:
    from rl_core.weights.publisher import WeightPublisher


def open_publisher(worker: Worker, cfg: RLJobSpec, ranks: Ranks) -> "WeightPublisher | None":
    """Return the publisher that serves a job's weights from rank 0. None on other ranks and outside a job."""
    if ranks.rank != 0 or worker.job is None:
        return None
    from rl_core.weights.publisher import WeightPublisher  # Imported here: only this rank needs its compiled kernels.

    host = split_address(worker.address)[0] if worker.keys is not None else "127.0.0.1"
    return WeightPublisher(
        cfg,
        worker.epoch,
        identity=worker.identity,
        keys=worker.keys,
        bind=f"tcp://{host}:0",
        device=worker.device,
        device_uuid=next(iter(worker.worker_info.device_uuids), None),
    )


def copy_to_devices(
    worker: Worker,
    cfg: RLJobSpec,
    ranks: Ranks,
    source: GatheredSource | AdapterSource,
    receivers: Sequence[ReceiverAddress],
    publisher: "WeightPublisher | None",
) -> Mapping[Place, list[Handle]] | None:
    """Make `source` copy the weights also to the GPUs of ranks other than 0 that rollouts in `receivers` share. Collective: all ranks call it.

    Returns the handles for `WeightPublisher.publish`; None if no rollout shares such a GPU.
    """
    if ranks.size == 1 or not isinstance(source, GatheredSource) or not maps_devices(cfg, worker.device):
        return None
    device_uuid = next(iter(worker.worker_info.device_uuids), worker.device)
    excluded = publisher.cannot_map if publisher is not None else frozenset()
    rank_infos = ranks.gather([tokens.host_token(), device_uuid, sorted(excluded)])
    places = [(host, device) for host, device, _ in rank_infos]
    mapping_receivers = [receiver for receiver in receivers if receiver.name not in rank_infos[0][2]]
    handle_counts = Counter(
        (receiver.host_token, device) for receiver in mapping_receivers for device in receiver.devices
    )
    # Rank 0 has a buffer of its own. Of several ranks on a device the first one has the copy.
    counts = [handle_counts[place] if rank and places.index(place) == rank else 0 for rank, place in enumerate(places)]
    if not any(counts):
        return None
    source.copies = DeviceCopies(ranks, source.layout, places, counts, seconds=cfg.runtime.deadlines.weight_sync)
    return source.copies.handles
