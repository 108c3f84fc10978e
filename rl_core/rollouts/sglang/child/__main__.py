"""The engine's child process, started by `process.EngineProcess` as `python -m rl_core.rollouts.sglang.child SOCKET MEMORY PARENT`.

SOCKET and MEMORY are file descriptors, PARENT is the pid of the worker. The records of `messages.engine` are exchanged over the socket;
MEMORY is a memory file into which the worker writes tensors. SGLang runs in a child process because it kills its whole process tree when one
of its processes dies, and the worker must survive that. The kernel kills the child when the worker ends, and SGLang's processes when the
child ends.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from rl_core.messages.engine import EngineFailure, EngineReady, EngineSettings
from rl_core.rollouts.sglang.child import stages
from rl_core.transports import pipe
from rl_core.workers.processes import die_with_parent

logger = logging.getLogger(__name__)


def main() -> int:
    """Build the engine and serve it until the stream ends; return the exit code."""
    stream, memory, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="engine: %(levelname)s %(message)s")
    sock = socket.socket(fileno=stream)
    # SGLang's processes must not inherit the socket and the memory file.
    for descriptor in (stream, memory):
        os.set_inheritable(descriptor, False)  # for processes that execute a program
    os.register_at_fork(after_in_child=sock.close)
    os.register_at_fork(after_in_child=lambda: os.close(memory))
    source: EngineSettings = pipe.receive_blocking(sock)
    try:
        engine = _build(source)
        stages.tell("warm-up: the first tokens")
        _warm_up(engine)
    except Exception as error:  # noqa: BLE001 - the worker gets any failure of the engine
        traceback.print_exc()
        sock.sendall(pipe.pack(EngineFailure(call=0, type=type(error).__name__, message=str(error))))
        return 2
    loads = engine.tokenizer_manager.load_snapshot_reader
    loads.read_all()  # The scheduler has created the file by now, and the reader opens it here.
    # Reader and scheduler have the file open. Its name would outlive the engine, which always ends by being killed.
    Path(loads.path).unlink(missing_ok=True)
    sock.sendall(pipe.pack(EngineReady(pids=[os.getpid(), *engine.get_all_child_pids()])))
    shared = mmap.mmap(memory, os.fstat(memory).st_size)
    try:
        engine.loop.run_until_complete(_serve(engine, sock, shared))
    except (EOFError, ConnectionError):
        logger.info("the worker is gone")
    return 0


def _build(source: EngineSettings) -> Any:
    stages.tell("the process imports SGLang")
    import sglang

    _import_only(source.architecture, Path(sglang.__file__).parent)
    from sglang.srt.entrypoints import engine

    from rl_core.rollouts.sglang.child import scheduler

    port, nccl_port = _free_ports(2)

    class Engine(engine.Engine):  # type: ignore[misc]
        """Names SGLang's file in shared memory after its owner, so that it is removed when this process is killed during the start."""

        run_scheduler_process_func = staticmethod(scheduler.run)

        @classmethod
        def _launch_scheduler_processes(cls, args: Any, ports: Any, *more: Any, **named: Any) -> Any:
            ports.instance_id = source.owner
            if args.device == "cpu":
                # A forked process does not import the libraries again, which takes 20 s. On a GPU it could not use CUDA.
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(args, ports, *more, **named)

    stages.tell("the scheduler starts")
    return Engine(**source.options, port=port, nccl_port=nccl_port)


def _warm_up(engine: Any) -> None:
    """Generate with the weights that the engine starts with, so that it compiles its kernels within the deadline of its start."""
    engine.generate(input_ids=[0], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    engine.flush_cache()


def _import_only(architecture: str, package: Path) -> None:
    """Let the scheduler import the modules of one architecture: importing those of all of them takes a quarter of its start."""
    modules = [path for path in (package / "srt" / "models").iterdir() if not path.name.startswith("_")]
    defining = {path for path in modules if path.suffix == ".py" and f"class {architecture}(" in path.read_text()}
    if defining:  # A model that none of these modules defines is left to SGLang.
        disabled = sorted(path.stem for path in modules if path not in defining)
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(disabled)


def _free_ports(count: int) -> list[int]:
    """Return TCP ports chosen by the kernel, so that engines that start together on one machine do not choose the same."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


async def _serve(engine: Any, sock: socket.socket, shared: mmap.mmap) -> None:
    from rl_core.rollouts.sglang.child.server import EngineServer

    reader, writer = await asyncio.open_connection(sock=sock)
    await EngineServer(engine, shared, writer).serve(reader)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not sys.exit: SGLang's exit handler waits up to a minute for its processes, which the kernel kills with this one.
    os._exit(code)
