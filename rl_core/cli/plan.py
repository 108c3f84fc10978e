"""`rljob plan`: tables of the processes and the memory of a job."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from rl_core.api.job import RLJobSpec
from rl_core.api.roles import ActorSpec
from rl_core.cli.job_file import load_job
from rl_core.cli.validate import GIB, memory_report
from rl_core.launch.local_plan import LOOPBACK
from rl_core.plan.capacity import CapacityReport, admit
from rl_core.plan.launch import LaunchPlan, PodPlan, ProcessPlan, build_launch_plan
from rl_core.plan.slots import idle_accelerators


def show_plan(file: Path, settings: Sequence[str], *, device_memory: float | None = None) -> int:
    """Print processes and memory of a job; return 0. Of the model only config.json is read.

    Raises CapacityError where a process needs more than `device_memory`, GiB, ConfigError where config.json cannot be read.
    """
    job = load_job(file, settings)
    meta = job.metadata
    plan, local = (
        build_launch_plan(job, name=meta.name, namespace=meta.namespace or "default", uid=meta.uid or "plan", host=host)
        for host in (None, LOOPBACK)
    )
    console = Console()
    console.print(process_table(plan, local))
    console.print(layout_line(job.spec.actor))
    report = memory_report(job, device_memory)
    if report is not None:
        console.print(memory_table(report))
    for line in _remarks(job.spec, report):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"digest {plan.digest}", style="dim")
    if report is not None:
        admit(report)
    return 0


def _remarks(spec: RLJobSpec, report: CapacityReport | None) -> Iterator[str]:
    """Yield remarks beside the tables: unused accelerators, the capacity of the KV pool, and estimates that were not compared."""
    yield from (f"warning: {problem}" for problem in idle_accelerators(spec))
    names = [tracker.name for tracker in spec.trackers]
    if "tensorboard" not in names:
        yield (
            f"Metrics go to {', '.join(['metrics.jsonl', *names])}. The list trackers replaces the default, which has tensorboard; "
            "add {name: tensorboard} for it."
        )
    if report is None:
        yield "The memory of a policy that acts in simulators is not estimated: only its class knows its size."
        return
    if report.pool is not None:
        yield str(report.pool)
    if report.device_memory is None and report.processes.keys() - report.on_cpu:
        yield "The estimate was compared with no device; give the memory of one in GiB: --device-memory 80"


def layout_line(actor: ActorSpec) -> str:
    """Return a line with the parallel sizes of the actor. Ranks are ordered by tensor first, then data, then pipeline."""
    parallel = actor.parallel
    return (
        f"actor: {actor.backend}, {actor.world_size} ranks = data {actor.data_parallel} x tensor {parallel.tensor}"
        f" x pipeline {parallel.pipeline}"
    )


def process_table(plan: LaunchPlan, local: LaunchPlan) -> Table:
    """Return one row per process, with its devices as numbered in its pod (`plan`) and, where there are any, on one machine (`local`)."""
    pairs = [
        (pod, process, locally)
        for pod, local_pod in zip(plan.pods, local.pods, strict=True)
        for process, locally in zip(_processes(pod), _processes(local_pod), strict=True)
    ]
    numbered = any(process.visible_devices for _, process, _ in pairs)
    devices = ("DEVICES", "LOCALLY") if numbered else ("DEVICES",)
    pod_column = Column("POD", overflow="fold")  # pods differ in the last letters of their names
    table = Table(pod_column, "PROCESS", "RANK", *devices, "THREADS", title=f"{len(plan.pods)} pods", box=SIMPLE)
    for pod, *processes in pairs:
        process = processes[0]
        texts = [",".join(member.placement.visible_accelerators) or "cpu" for member in processes][: len(devices)]
        threads = process.env.get("OMP_NUM_THREADS", "")
        table.add_row(pod.name, process.name, str(process.rank), *texts, threads)
    return table


def _processes(pod: PodPlan) -> list[ProcessPlan]:
    return [process for container in pod.containers for process in container.processes]


def memory_table(report: CapacityReport) -> Table:
    """Return one row for each group and phase of the estimate."""
    table = Table(
        "ROLE", "PHASE", "DEVICE GiB", "HOST GiB", "LARGEST PART", title="memory per process (estimate)", box=SIMPLE
    )
    for row in report.rows:
        largest = max(row.parts, key=lambda part: row.parts[part]) if row.parts else ""
        table.add_row(row.role, row.phase, f"{row.device / GIB:.2f}", f"{row.host / GIB:.2f}", largest)
    return table
