"""Opens the weight publisher of an actor."""

from typing import TYPE_CHECKING

from rl_core.actors.ranks import Ranks
from rl_core.api.job import RLJobSpec
from rl_core.transports.sockets import split_address
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
