"""Started once for several files: an RPC service with its server and a client, receivers of weights, a rollout with the SGLang engine."""

import gc
import sys

import pytest

from rl_core.rollouts.sglang import SGLangWorker
from rl_core.transports.rpc import RpcClient, RpcServer
from tests.integration import weight_world
from tests.integration.rollout_world import World
from tests.integration.rpc_samples import Service


def joined_groups() -> bool:
    """Return whether this process is in a process group. Does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


@pytest.fixture(autouse=True)
def _dead_actors_are_collected():
    """Let go of the process groups of a test's actors. Each has three threads, which poll until no object refers to the group."""
    yield
    if joined_groups():
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _process_groups_end_with_the_file():
    """End all process groups of this process, including those that libraries made."""
    yield
    if not joined_groups():
        return
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None:
        megatron.destroy_model_parallel()
    sys.modules["torch.distributed"].destroy_process_group()


@pytest.fixture
def service():
    """Handlers of all kinds; those that block are let go at the end."""
    service = Service()
    yield service
    service.release.set()


@pytest.fixture
def server(service):
    """A server of `service` on loopback without keys."""
    server = RpcServer("tcp://127.0.0.1:0", service).start()
    yield server
    server.close()


@pytest.fixture
def client(server):
    """A client of `server`."""
    client = RpcClient(server.address)
    yield client
    client.close()


ARGUMENTS = {"decode_log_interval": 100, "max_prefill_tokens": 4096}


@pytest.fixture(scope="session")
def sglang_world():
    """A rollout worker with the real engine, to which versions come as patches where that is smaller."""
    spec = {"weights": {"syncer": "patch", "verifyEvery": 3}}
    made = World(SGLangWorker, max_seq_len=64, spec=spec, engine="sglang", maxBatch=64, engineArgs=ARGUMENTS)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="session")
def receivers():
    """Two processes that take weights: rollout:0 has them written in place, the engine of rollout:1 copies them."""
    pair = weight_world.Receiver("rollout:0", in_place=True), weight_world.Receiver("rollout:1")
    with weight_world.started(*pair) as both:
        yield both
