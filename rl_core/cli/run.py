"""`rljob run`: checks the job, starts its processes on this machine, shows progress, and ends them.

After Ctrl-C the run saves a checkpoint and ends within seconds; a second Ctrl-C ends all processes at once.
"""

import contextlib
import json
import os
import secrets
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob
from rl_core.api.validation_metric import ValidationMetric, validation_metric
from rl_core.checkpoint.manifest import MANIFEST
from rl_core.cli.progress import ProgressDisplay
from rl_core.cli.resume import checkpoint_folder, resume_line
from rl_core.cli.validate import GIB, memory_report, prepare
from rl_core.launch.local import LocalCluster
from rl_core.launch.ports import free_ports
from rl_core.launch.workspace import Workspace
from rl_core.plan.capacity import admit
from rl_core.plan.groups import groups_of
from rl_core.plan.keys import MASTER_BYTES, key_files, write_key_folder
from rl_core.plan.launch import LaunchPlan, build_launch_plan
from rl_core.plan.slots import own_pods

HOST = "127.0.0.1"
RUN_FOLDER = ".rljob"
"""Folder in the output folder for keys, pod plans and the resolved job of the current run."""


def run_job(file: Path, *, output: Path | None, settings: Sequence[str], resume: str, progress: bool) -> int:
    """Run the job to its end; return the exit code (0 success, 2 bad input, 3 or 4 failure, 130 interrupted)."""
    job = prepare(file, settings)
    folder = (output or Path("outputs") / job.metadata.name).resolve()
    check_devices(job)
    check_output(folder, resume)
    resumed = resume_line(job, folder, resume)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(file.resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    space = Workspace(folder)
    space.lock()  # Locked before anything is written: the folder may hold the keys and the job of a live run.
    plan_for = prepare_folder(job, folder)
    first_epoch = next_epoch(folder)
    cluster = LocalCluster(
        plan_for(first_epoch),
        workdir=space,
        plan_for=plan_for,
        policy=job.spec.failure_policy,
        resume=resume_argument(resume),
        groups=groups_of(job.spec),
    )
    measured = validation_metric(job)
    with ProgressDisplay(
        folder, total=job.spec.algorithm.steps, live=progress, measured=measured, ending=lambda: cluster.ending
    ) as display:
        display.say(f"{job.metadata.name}: {job.spec.algorithm.name}, {job.spec.algorithm.steps} steps -> {folder}")
        if resumed:
            display.say(resumed)
        code = cluster.run(on_status=display.update, on_interrupt=display.say)
        display.finish()
    return report(job, folder, code)


def resume_argument(resume: str) -> str:
    """Return auto, none or the absolute path of a checkpoint."""
    return resume if resume in ("auto", "none") else str(Path(resume).resolve())


def check_devices(job: RLJob) -> None:
    """Raise ConfigError if the job asks for more accelerators than this machine has, so that no run falls back to the CPU by accident.

    Raises ConfigError too if CUDA_VISIBLE_DEVICES of the shell names others than the run would take, and CapacityError when the smallest
    accelerator has too little memory.
    """
    spec = job.spec
    # Rollouts in pods of the actor use the accelerators of those pods.
    num_needed = sum(group.spec.gpus * len(own_pods(spec, name)) for name, group in groups_of(spec).items())
    if not num_needed:
        return
    sizes = device_sizes()
    if len(sizes) < num_needed:
        raise ConfigError(
            f"the job asks for {num_needed} accelerators, got {len(sizes)} visible on this machine; lower gpus or set it to 0 for CPU"
        )
    selected, taken = os.environ.get("CUDA_VISIBLE_DEVICES"), [str(number) for number in range(num_needed)]
    if selected is not None and selected.split(",")[:num_needed] != taken and not spec.placement.component_placement:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES must begin with {','.join(taken)} or be unset, because a run takes the first accelerators, got {selected}; "
            "unset it, and choose others by placement.componentPlacement"
        )
    report = memory_report(job, min(sizes) / GIB)
    if report is not None:
        admit(report)


def device_sizes() -> list[int]:
    """Return the bytes of memory of each NVIDIA device; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return []


def check_output(folder: Path, resume: str) -> None:
    """Raise ConfigError when a new run would overwrite the run in the folder, or when there is no checkpoint to resume from.

    A run that ended before its first step has nothing to overwrite.
    """
    if resume == "none" and holds_steps(folder):
        step = read_step(folder)
        raise ConfigError(
            f"{folder} holds a run (at step {step}); continue it with --resume auto, or choose another folder with --output"
        )
    if resume not in ("auto", "none") and not (Path(resume) / "manifest.json").is_file():
        saved = sorted(Path(resume).glob("checkpoints/step-*/manifest.json"))
        way_out = f"its newest checkpoint is {saved[-1].parent}" if saved else "name a folder step-* of checkpoints/"
        problem = "which holds no manifest.json" if Path(resume).is_dir() else "which does not exist"
        raise ConfigError(
            f"--resume must be auto, none or a complete checkpoint folder, got {resume}, {problem}; {way_out}"
        )


def holds_steps(folder: Path) -> bool:
    """Return whether the run in `folder` has trained a step or saved a checkpoint."""
    trained = any(int(line.get("step", 0)) > 0 for line in read_metrics(folder))
    return trained or any(folder.glob(f"checkpoints/step-*/{MANIFEST}"))


def read_step(folder: Path) -> int | str:
    """Return the last step of the run in `folder`, "?" if it is not known.

    It is the larger of the steps in status.json and metrics.jsonl: the status of a resumed run starts at 0 until the checkpoint is loaded.
    """
    steps = [int(line.get("step", 0)) for line in read_metrics(folder)[-1:]]
    with contextlib.suppress(OSError, ValueError):
        steps.append(int(json.loads((folder / "status.json").read_text()).get("step", 0)))
    return max(steps, default="?")


def next_epoch(folder: Path) -> int:
    """Return 0 for a fresh folder, else one above the newest epoch of the run in it, so that its messages and files are fenced.

    The status and the checkpoints each name an epoch. A file that a loss of power has cut short is skipped.
    """
    newest = -1
    for path in (folder / "status.json", *folder.glob(f"checkpoints/*/{MANIFEST}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            newest = max(newest, int(json.loads(path.read_text())["epoch"]))
    return newest + 1


def prepare_folder(job: RLJob, folder: Path) -> "PlanFactory":
    """Write job.yaml, the keys and the resolved job to the folder; return the factory of launch plans by epoch."""
    private = folder / RUN_FOLDER
    private.mkdir(parents=True, exist_ok=True)
    resolved = job.model_dump(mode="json", by_alias=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False))
    config = private / "job.json"
    config.write_text(json.dumps(resolved))
    uid = uuid.uuid4().hex
    write_key_folder(private / "keys", key_files(secrets.token_bytes(MASTER_BYTES), uid, groups_of(job.spec)))
    return PlanFactory(job, uid=uid, config=config)


class PlanFactory:
    """Makes the launch plan of an epoch. All epochs of a run use the same free ports, so that pods can reconnect."""

    def __init__(self, job: RLJob, *, uid: str, config: Path) -> None:
        self._job, self._uid, self._config = job, uid, config
        self._ports = free_ports()

    def __call__(self, epoch: int, replicas: Mapping[str, int] | None = None) -> LaunchPlan:
        """Return the plan of `epoch`; `replicas` maps groups that were scaled to their number of pods."""
        return build_launch_plan(
            self._job,
            name=self._job.metadata.name,
            namespace=self._job.metadata.namespace or "default",
            uid=self._uid,
            epoch=epoch,
            replicas=replicas,
            ports=self._ports,
            host=HOST,
            config=str(self._config),
        )


def report(job: RLJob, folder: Path, code: int) -> int:
    """Print how the run ended and where its results are; return the exit code."""
    status = json.loads((folder / "status.json").read_text()) if (folder / "status.json").is_file() else {}
    if code == 0:
        sys.stdout.write(success_text(folder, status, validation_metric(job)))
        return 0
    failure = status.get("failure") or {}
    message = failure.get("message") or "no cause was recorded"
    outcome = {2: "ended with bad input", 4: "ended with bad data", 130: "was interrupted"}.get(
        code, "ended with failure"
    )
    sys.stderr.write(
        f"rljob: {job.metadata.name} {outcome} (exit code {code}) at step {read_step(folder)}: {message}\n"
    )
    # A run that ended with code 4 would meet the same data again.
    resume_hint = "" if code == 4 else way_on(job, folder)
    sys.stderr.write(
        f"rljob: look at it with rljob view {shlex.quote(str(folder))}; logs in {folder / 'logs'}{resume_hint}\n"
    )
    return code


def way_on(job: RLJob, folder: Path) -> str:
    """Return how to go on with a run that ended early: continue its newest checkpoint, or start it again where there is none."""
    if any(checkpoint_folder(job, folder).glob(f"step-*/{MANIFEST}")):
        return f"; continue with --output {folder} --resume auto"
    if holds_steps(folder):
        return f"; begin again at step 0 with --output {folder} --resume auto"
    return "; no step was trained: start it again with the same command"


def success_text(folder: Path, status: dict[str, Any], measured: ValidationMetric) -> str:
    """Return the closing lines of a run that ended well."""
    values = [(line.get("step"), line[measured.key]) for line in read_metrics(folder) if measured.key in line]
    restarts = (status.get("failures") or {}).get("actor/restart")
    restarts_text = f", {restarts} restarts in all" if restarts else ""
    lines = [
        f"step {status.get('step')}/{status.get('totalSteps')}, policy version {status.get('policyVersion')}{restarts_text}"
    ]
    if values:
        (first_step, first_value), (last_step, last_value) = values[0], values[-1]
        results = [f"{last_value:.3f} {'after' if last_step else 'before training'}"]
        if len(values) > 1:
            results.insert(0, f"{first_value:.3f} {f'at step {first_step}' if first_step else 'before'}")
        lines.append(f"validation {measured.name}: {', '.join(results)}")
    lines.append(f"look at it: rljob view {shlex.quote(str(folder))}")
    if (folder / "model").is_dir():  # a program without an actor trains none
        lines.append(f"model: {folder / 'model'}")
    lines.append(f"metrics: {folder / 'metrics.jsonl'}")
    return "\n".join(lines) + "\n"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without incomplete ones."""
    lines = []
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
