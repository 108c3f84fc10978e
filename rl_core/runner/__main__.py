"""The runner process of actor-0: builds the parts, runs the program, ends with a documented exit code."""

import faulthandler
import json
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

from rl_core.api.errors import ConfigError, RLJobError, exit_code
from rl_core.api.identity import Identity
from rl_core.api.job import RLJob
from rl_core.channel.client import configure, current
from rl_core.data.dataset import PromptDataset, load_prompts
from rl_core.data.hub import fetch_references
from rl_core.data.tokenizer import Tokenizer, read_files
from rl_core.observability.logging import configure_logging
from rl_core.observability.trackers import Trackers
from rl_core.runner.base import Runner, RunSummary
from rl_core.runner.changes import for_elastic_roles
from rl_core.runner.control import ControlServer
from rl_core.runner.history import write_json
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.limits import sequence_limit
from rl_core.runner.reasoning import ReasoningRunner
from rl_core.runner.status import Phase
from rl_core.runner.steering import StopKind
from rl_core.transports.curve import KeyRing
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.hub import Hub, Member, MemberState

logger = logging.getLogger(__name__)

ACTOR_CLASSES = {"fsdp2": "rl_core.actors.fsdp.actor:FSDPActor"}
ROLLOUT_CLASSES = {"hf": "rl_core.rollouts.hf.worker:HFRolloutWorker"}
ENV_CLASS = "rl_core.envs.worker:TextEnvWorker"
ATTEMPTS = {"data": 1, "deadline": 1, "infrastructure": 3, "worker_lost": 20, "stale": 20, "epoch": 1000}
"""Attempts of a group per reason; data and deadline failures were already retried by the rollout."""


def load_data(job: RLJob, tokenizer: Tokenizer, limit: int) -> tuple[PromptDataset, PromptDataset | None]:
    """Return the training and validation prompts."""
    data, task = job.spec.data, job.spec.env.type
    train = load_prompts(data.train, data, tokenizer, field="data.train", task_name=task, max_seq_len=limit)
    if train.dropped_overlong:
        logger.warning(
            "data.train: %s prompts of %s tokens or more dropped (data.onOverlong)", train.dropped_overlong, limit
        )
    if data.validation is None:
        return train, None
    return train, load_prompts(
        data.validation, data, tokenizer, field="data.validation", task_name=task, max_seq_len=limit
    )


def build(job: RLJob, identity: Identity, *, output: Path, resume: str) -> Runner:
    """Return the runner with its parts wired; its hub serves from here on."""
    model = Path(job.spec.model.path)
    if not (model / "config.json").is_file():
        raise ConfigError(f"model.path must be a folder with config.json, got {model}; check the path")
    files = read_files(model)
    tokenizer = Tokenizer.from_files(files, origin=str(model))
    limit = sequence_limit(job.spec, json.loads(files["config.json"]))
    train, validation = load_data(job, tokenizer, limit)
    spec = job.spec
    ledger = PromptLedger(
        train,
        seed=spec.algorithm.seed,
        shuffle=spec.data.shuffle,
        lease_seconds=2 * spec.runtime.deadlines.rollout,
        max_attempts=ATTEMPTS,
    )
    trackers = Trackers.build(spec.trackers, name=job.metadata.name, output=output)
    keys = KeyRing(Path(identity.curve_dir), "runner") if identity.curve_dir else None
    configure(identity.channel, keys, identity)
    stable = for_elastic_roles(spec)
    hub = Hub(job=job, identity=identity, keys=keys, files=files)
    cluster = Cluster(hub)
    placement = {"max_seq_len": limit}
    groups = {
        "actor": WorkerGroup.of(ACTOR_CLASSES[spec.actor.backend], spec).launch(cluster, name="actor"),
        "rollout": WorkerGroup.of(ROLLOUT_CLASSES[spec.rollout.engine], stable, placement).launch(
            cluster, name="rollout"
        ),
        "env": WorkerGroup.of(ENV_CLASS, stable.env).launch(cluster, name="env"),
    }
    runner = ReasoningRunner(
        job,
        cluster,
        groups,
        ledger,
        trackers,
        output=output,
        epoch=identity.epoch,
        resume=resume,
        first_epoch=int(os.environ.get("RLJOB_FIRST_EPOCH", identity.epoch)),
        in_cluster=identity.in_cluster,
        train=train,
        validation=validation,
    )
    hub.listen(joined=runner.membership.welcome, lost=lambda member, reason: _lost(runner, member, reason))
    hub.add_handlers({"admit": runner.intake.admit}, role="actor")
    hub.add_handlers({"give_back": runner.give_back}, role="rollout")
    hub.start()
    return runner


def _lost(runner: Runner, member: Member, reason: str) -> None:
    """Hand the leases of a rollout that is gone back at once and let a weight sync go on without it; its replacement will be welcomed."""
    runner.membership.forget(member)
    if member.state is not MemberState.DRAINED:
        runner.board.count_failure(member.role, "lost")
    if member.role == "rollout":
        runner.actor.execute_on(0).receiver_lost(member.name, reason)
        current().rpc.call_future(
            "consumer_lost", member.name, list(member.incarnation), timeout=runner.spec.runtime.deadlines.rpc
        )


def housekeeping(runner: Runner, ended: threading.Event) -> None:
    """Once a second let the runner tidy up and log what the stall detector sees."""
    told = None
    while not ended.wait(1.0):
        try:
            runner.housekeep()
        except RLJobError as error:
            logger.warning("housekeeping: %s", error)
        except Exception:  # a bug here must not end the only thread that requeues overdue leases and finds stalls
            logger.exception("housekeeping failed")
        stall = runner.status()["stall"]
        if stall is not None and stall["reason"] != told:
            logger.warning("stall: %s: %s", stall["reason"], stall["message"])
        told = stall["reason"] if stall else None


def interrupt_on_sigterm(runner: Runner) -> None:
    """Let SIGTERM interrupt the run, from a thread: a handler runs inside the loop's, which may hold the locks that `stop` takes."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def obey() -> None:
        while asked.get():
            runner.stop("SIGTERM", StopKind.INTERRUPT)

    threading.Thread(target=obey, name="sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, _: asked.put(number))


def serve(runner: Runner, port: int, token: str | None, *, in_cluster: bool) -> ControlServer:
    """Open the control port: to the operator, which shows the token, else to this machine alone."""
    host = "0.0.0.0" if in_cluster and token is not None else "127.0.0.1"
    return ControlServer(host, port, token=token, status=runner.status, actions=runner.controls().actions())


def read_job(path: Path) -> RLJob:
    """Return the resolved job. Raises ConfigError for one that this version does not read."""
    try:
        return RLJob.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ConfigError(
            f"{path} must hold a job as this version knows it, got: {error}; use an image and an operator of the same release"
        ) from error


def read_token(curve_dir: str) -> str | None:
    """Return the job's bearer token, None without keys."""
    path = Path(curve_dir) / "control.token"
    return path.read_text().strip() if curve_dir and path.is_file() else None


def main() -> int:
    """Run to the end; return the exit code (0 done, 2 configuration, 3 infrastructure, 4 data)."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where does it wait: kill -USR1 PID, then read the log
    try:
        identity = Identity.from_env()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return exit_code(error)
    configure_logging(identity)
    output = Path(os.environ["RLJOB_OUTPUT"])
    runner: Runner | None = None
    ended = threading.Event()
    try:
        job = fetch_references(read_job(Path(identity.config)))
        output.mkdir(parents=True, exist_ok=True)
        runner = build(job, identity, output=output, resume=os.environ.get("RLJOB_RESUME", "none"))
        interrupt_on_sigterm(runner)
        port, token = int(os.environ["RLJOB_CONTROL_PORT"]), read_token(identity.curve_dir)
        serve(runner, port, token, in_cluster=identity.in_cluster)
        if (
            identity.in_cluster
        ):  # the supervisor tells it as the last word; an earlier epoch's must not be taken for ours
            write_json(output / "status.json", runner.status())
        threading.Thread(target=housekeeping, args=(runner, ended), name="housekeeping", daemon=True).start()
        summary = runner.run()
        logger.info("%s", summary)
        code = end(runner, summary)
        outcome = "Finished" if code == 0 else "Failed"
    except Exception as error:  # also a bug: whoever looks at the run must hear why it ended
        logger.exception("the run failed")
        code, outcome = failure_code(error), "Failed"
        failure = {"type": type(error).__name__, "message": str(error), "exitCode": code}
        if runner is None:
            tell(output, {"schema": 1, "phase": "Failed", "epoch": identity.epoch, "failure": failure})
        else:
            runner.board.end(Phase.FAILED, failure)
    ended.set()
    if runner is not None:
        runner.trackers.finish(outcome)
        tell(output, runner.status())
        runner.close()
    return code


def tell(output: Path, status: Mapping[str, Any]) -> None:
    """Leave the last word in the output folder; one that takes nothing any more must not hide the exit code."""
    try:
        write_json(output / "status.json", status)
    except OSError as error:
        logger.error("%s/status.json could not be written: %s", output, error)


def end(runner: Runner, summary: RunSummary) -> int:
    """Tell the end of a run without an error; return the exit code, 3 when its pod must go though steps are left."""
    if summary.status == "Interrupted":
        saved = f"saved at step {summary.step}" if runner.checkpoints.last_step == summary.step else "nothing was saved"
        message = f"{runner.stop_reason}: ended at step {summary.step} to be resumed; {saved}"
        runner.board.end(Phase.FAILED, {"type": "Interrupted", "message": message, "exitCode": 3})
        return 3
    if summary.status == "Suspended":
        runner.board.set(suspended=True)
    runner.board.end(Phase.SUSPENDED if summary.status == "Suspended" else Phase.FINISHED)
    return 0


def failure_code(error: BaseException) -> int:
    """Return the exit code for an error; of several the first with a code other than 3 decides."""
    if isinstance(error, ExceptionGroup):
        return next((code for inner in error.exceptions if (code := failure_code(inner)) != 3), 3)
    return exit_code(error)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # sockets' and pools' threads hold no state worth waiting for
