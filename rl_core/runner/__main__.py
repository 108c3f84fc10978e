"""The runner process, which runs in the pod actor-0: builds the runner, executes the program, exits with a documented code."""

import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_core.api import document
from rl_core.api.errors import ConfigError, RLJobError, exit_code
from rl_core.api.identity import Identity
from rl_core.api.job import RLJob
from rl_core.api.user_code import describe
from rl_core.data.hub import fetch_references
from rl_core.observability.logging import configure_logging
from rl_core.plan.keys import TOKEN_FILE
from rl_core.plan.signatures import Peer
from rl_core.runner.build import build
from rl_core.runner.control import ControlServer
from rl_core.runner.history import write_json
from rl_core.runner.runner import Runner, RunSummary
from rl_core.runner.status import Phase
from rl_core.runner.stopping import StopKind

logger = logging.getLogger(__name__)


def interrupt_on_sigterm(runner: Runner) -> None:
    """Interrupt the run on SIGTERM, from a thread of its own.

    A signal handler runs inside the loop's thread, which may hold the locks that `stop` takes.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def interrupt() -> None:
        while signals.get():
            runner.stop("SIGTERM", StopKind.INTERRUPT)

    threading.Thread(target=interrupt, name="sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda signum, _: signals.put(signum))


def serve(runner: Runner, port: int, peer: Peer | None, *, in_cluster: bool) -> ControlServer:
    """Open the control port. In a cluster with keys it listens on all interfaces, for the signed calls of the operator; else on loopback."""
    host = "0.0.0.0" if in_cluster and peer is not None else "127.0.0.1"
    return ControlServer(host, port, peer=peer, status=runner.status, actions=runner.actions())


def read_job(path: Path) -> RLJob:
    """Return the resolved job in the file `path`. Raises ConfigError if this version cannot read it."""
    try:
        return document.read(RLJob, path.read_text())
    except (ConfigError, ValidationError) as error:
        raise ConfigError(f"{path} must hold a job that this version understands, got: {error}") from error


def read_peer(identity: Identity) -> Peer | None:
    """Return the token, job uid and epoch with which this runner verifies control calls and signs the answers; None without keys."""
    path = Path(identity.curve_dir) / TOKEN_FILE
    if not identity.curve_dir or not path.is_file():
        return None
    return Peer(token=path.read_text().strip(), uid=identity.uid, epoch=identity.epoch)


def main() -> int:
    """Run to the end; return the exit code (0 done, 2 configuration, 3 infrastructure, 4 data)."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` writes the stacks of all threads to the log.
    try:
        identity = Identity.from_env()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return exit_code(error)
    configure_logging(identity)
    output = Path(os.environ["RLJOB_OUTPUT"])
    runner: Runner | None = None
    run_ended = threading.Event()
    try:
        job = fetch_references(read_job(Path(identity.config)))
        output.mkdir(parents=True, exist_ok=True)
        runner = build(job, identity, output=output, resume=os.environ.get("RLJOB_RESUME", "none"))
        interrupt_on_sigterm(runner)
        port = int(os.environ["RLJOB_CONTROL_PORT"])
        serve(runner, port, read_peer(identity), in_cluster=identity.in_cluster)
        if (
            identity.in_cluster
            # The supervisor reports this file when the pod ends. A file of an earlier epoch must not be reported for this one.
        ):
            write_json(output / "status.json", runner.status())
        elif not (output / "status.json").exists():  # `rljob status` and `rljob scale` work from the first second on
            write_status(output, runner.status())
        tasks = runner.periodic_tasks()
        threading.Thread(target=tasks.run, args=(run_ended,), name="periodic-tasks", daemon=True).start()
        summary = runner.execute()
        logger.info("%s", summary)
        code = end(runner, summary)
        outcome = "Finished" if code == 0 else "Failed"
    except Exception as error:  # Bugs included: the status must say why the run ended.
        logger.exception("the run failed")
        code, outcome = failure_code(error), "Failed"
        message = str(error) if isinstance(error, RLJobError | ExceptionGroup) else describe(error)
        failure = {"type": type(error).__name__, "message": message, "exitCode": code}
        if runner is None:
            write_status(output, {"schema": 1, "phase": "Failed", "epoch": identity.epoch, "failure": failure})
        else:
            runner.run.board.end(Phase.FAILED, failure)
    run_ended.set()
    if runner is not None:
        runner.run.trackers.finish(outcome)
        write_status(output, runner.status())
        runner.close()
    return code


def write_status(output: Path, status: Mapping[str, Any]) -> None:
    """Write the last status to the output folder. A failure is logged only: it must not hide the exit code."""
    try:
        write_json(output / "status.json", status)
    except OSError as error:
        logger.error("%s/status.json could not be written: %s", output, error)


def end(runner: Runner, summary: RunSummary) -> int:
    """Report the end of a run without an error; return the exit code: 3 if steps are left and the pod must be replaced, else 0."""
    if summary.status == "Interrupted":
        newest = runner.program.saving.checkpoints.last_step
        saved = f"saved at step {summary.step}" if newest == summary.step else "nothing was saved"
        if runner.run.stops.kind is StopKind.ROLLBACK:
            saved += f", the last good checkpoint is {'none' if newest is None else f'of step {newest}'}"
        message = f"{runner.run.stops.reason}: ended at step {summary.step} to be resumed; {saved}"
        runner.run.board.end(Phase.FAILED, {"type": "Interrupted", "message": message, "exitCode": 3})
        return 3
    if summary.status == "Suspended":
        runner.run.board.set(suspended=True)
    runner.run.board.end(Phase.SUSPENDED if summary.status == "Suspended" else Phase.FINISHED)
    return 0


def failure_code(error: BaseException) -> int:
    """Return the exit code for an error; for an ExceptionGroup, the first code of its errors other than 3."""
    if isinstance(error, ExceptionGroup):
        return next((code for cause in error.exceptions if (code := failure_code(cause)) != 3), 3)
    return exit_code(error)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # The threads of sockets and pools have nothing left to store.
