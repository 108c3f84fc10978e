"""The display of `rljob run`: a live bar and table on a terminal, otherwise a line per step."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rl_core.api.validation_metric import ACCURACY, ValidationMetric
from rl_core.cli.local_view import FINAL, run_table, wait_table
from rl_core.messages.members import DISK_SPACE

WAITING_S = 5.0
"""Seconds without a line after which it is said what the run waits for."""
SPACE_S = 30.0
"""Seconds after which a run that waits for disk space says so again."""
QUIET_WAIT_S = 5.0
"""Seconds after which a wait is shown."""
LINE_INTERVAL_S = 0.2


class ProgressDisplay:
    """Displays a run; `update` is called with each new status."""

    def __init__(
        self,
        folder: Path,
        *,
        total: int,
        live: bool,
        measured: ValidationMetric = ACCURACY,
        ending: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Display the run of `total` steps in `folder`; with `live` False, or without a terminal, as lines.

        `measured` is the metric of validation. Once `ending()` is true, waits are no longer reported.
        """
        self._measured, self._ending = measured, ending
        self._clock = clock
        self._start = self._last_line = clock()
        self._pause = WAITING_S
        """Seconds without a line after which the next one says what the run waits for."""
        self._status: dict[str, Any] = {}
        self._metrics = folder / "metrics.jsonl"
        self._total = total
        self._console = Console()
        self._live: Live | None = None
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None
        self._phase = ""
        self._refused = ""
        """The last reported reason for which the storage refused a checkpoint."""
        self._space_reported: float | None = None
        """Clock at which the wait for disk space was last reported; None = the run does not wait for it."""
        self._passed_over: list[str] = []
        """Damaged checkpoints that were reported."""
        self._deleted = ""
        """The last checkpoint whose deletion, to free disk space, was reported."""
        self._disabled: set[str] = set()
        """Trackers that were reported as disabled."""
        self._silent: set[str] = set()
        """Members whose missing heartbeats were reported."""
        if live and self._console.is_terminal:
            self._live = Live(self._bar, console=self._console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        else:
            offset = self._metrics.stat().st_size if self._metrics.exists() else 0
            self._reader = threading.Thread(target=self._follow, args=(offset,), name="progress", daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Print one line."""
        self._last_line = self._clock()
        self._console.print(text, highlight=False, soft_wrap=True)

    def update(self, status: dict[str, Any]) -> None:
        """Show a new status."""
        self._status = status
        phase = str(status.get("phase", ""))
        checkpoint = status.get("checkpoint") or {}
        passed_over = list(checkpoint.get("passedOver") or ())
        if passed_over and passed_over != self._passed_over:
            reasons = "; ".join(passed_over)
            self.say(f"resumed at step {checkpoint.get('resumedFrom')}, as newer checkpoints are damaged: {reasons}")
        self._passed_over = passed_over or self._passed_over
        for name, reason in (status.get("disabledTrackers") or {}).items():
            if name not in self._disabled:
                self._disabled.add(name)
                kept_in = (
                    "metrics.jsonl lacks the further steps"
                    if name == "jsonl"
                    else "its metrics are in metrics.jsonl only"
                )
                self.say(f"tracker {name} is disabled, {kept_in}: {reason}")
        for name in (checkpoint.get("deletedForRoom") or [])[-1:]:
            if name != self._deleted:
                self.say(f"the storage is full: {name} is deleted before its time to make room for the next checkpoint")
                self._deleted = name
        refused = str(checkpoint.get("error") or "")
        space = next((wait for wait in status.get("waits") or () if wait["on"] == DISK_SPACE), None)
        if space is not None:
            self._tell_space(space, refused)
        elif refused and refused != self._refused and phase not in {*FINAL, "Restarting"}:
            lag_text = f"the newest is {checkpoint.get('lag', '?')} steps behind"
            self.say(f"the run goes on, but without a new checkpoint, {lag_text}: {refused}")
        self._refused = refused
        self._space_reported = self._space_reported if space is not None else None
        if phase not in {*FINAL, "Restarting"} and not self._ending():
            self._tell_silence(status)
        if self._live is None:
            degraded = phase == "Degraded" and phase != self._phase and not self._ending()
            # Without missing members the line is empty, and `tell_waiting` reports the wait once it is long.
            if degraded and (line := degraded_line(status)):
                self.say(line)
            self._phase = phase
            return
        self._bar.update(self._task, completed=int(status.get("step", 0)), description=phase)
        waits = [wait for wait in status.get("waits", []) if wait["seconds"] >= QUIET_WAIT_S]
        tables = [run_table(status, self._measured), wait_table(status | {"waits": waits})]
        self._live.update(Group(self._bar, *[table for table in tables if table is not None]))

    def _tell_space(self, wait: dict[str, Any], cause: str) -> None:
        """Report a wait for disk space at once, and again each SPACE_S seconds."""
        now = self._clock()
        if self._space_reported is None or now - self._space_reported >= SPACE_S:
            self._space_reported = now
            line = (
                f"{time.strftime('%H:%M:%S')}  no disk space for {wait['what']} since {wait['seconds']:.0f} s: {cause}"
            )
            self.say(f"{line}; the write is repeated, and the run goes on by itself when there is space")

    def _tell_silence(self, status: dict[str, Any]) -> None:
        """Report each member without heartbeats once, and again when its heartbeats resume or it is replaced."""
        silent = {wait["on"]: wait["seconds"] for wait in status.get("waits", []) if wait["who"] == "hub"}
        for name in silent.keys() - self._silent:
            self.say(f"{name} has been silent for {silent[name]:.0f} s; the run goes on without it or waits for it")
        for name in self._silent - silent.keys():
            self.say(f"{name} is here again")
        self._silent = set(silent)

    def tell_waiting(self) -> None:
        """Say what the run waits for when nothing was printed for a while; during the start each 5 s, later at growing intervals."""
        quiet = self._ending() or self._status.get("phase") in FINAL
        if quiet or self._clock() - self._last_line < self._pause:
            return
        self.say(waiting_line(self._status, self._clock() - self._start))
        if self._status.get("step"):
            self._pause *= 2

    def finish(self) -> None:
        """Print the remaining lines."""
        self._ended.set()
        if self._reader is not None:
            self._reader.join(timeout=2)

    def _follow(self, position: int) -> None:
        """Print a line for each step that metrics.jsonl got since the last call. After a restart has truncated the file, continue at its new end."""
        stopped = False
        while not stopped:
            stopped = self._ended.wait(LINE_INTERVAL_S)
            if not stopped:
                self.tell_waiting()
            if not self._metrics.exists():
                continue
            with self._metrics.open(encoding="utf-8") as file:
                size = file.seek(0, 2)
                file.seek(min(position, size))
                text = file.read()
            complete = text[: text.rfind("\n") + 1]
            position = min(position, size) + len(complete.encode())
            for line in complete.splitlines():
                try:
                    line_of_step = step_line(json.loads(line), self._total, self._measured)
                except (ValueError, KeyError, TypeError):  # The line was cut off by a full disk, or is the rest of one.
                    continue
                self.say(line_of_step)
                self._pause = WAITING_S
        sys.stdout.flush()


def degraded_line(status: dict[str, Any]) -> str:
    """Return a line, with the time, that names the members that a degraded run lacks; "" if none is missing."""
    names = [str(member["name"]) for member in status.get("missing") or ()]
    if not names:
        return ""
    now, verb = time.strftime("%H:%M:%S"), "is" if len(names) == 1 else "are"
    return (
        f"{now}  Degraded, step {status.get('step', 0)}: {', '.join(names)} ended or {verb} unreachable and {verb} started again;"
        f" unfinished prompt groups are generated again"
    )


def waiting_line(status: dict[str, Any], seconds: float) -> str:
    """Return a line, with the time, that says what a run waits for. `seconds` is the time since its start; it is shown without a status."""
    now = time.strftime("%H:%M:%S")
    if not status:
        return f"{now}  starting for {seconds:.0f} s: the runner loads its libraries"
    waits = sorted(status.get("waits") or [], key=lambda wait: (wait["on"] != DISK_SPACE, -float(wait["seconds"])))
    # While the runner waits for disk space, the others wait for the runner.
    waits = waits[: 1 if waits and waits[0]["on"] == DISK_SPACE else 2]
    step = status.get("step")  # 0 until a checkpoint is loaded, also in a run that is resumed.
    place = status.get("phase", "Starting") + (f", step {step}" if step else "")
    lines = [f"{wait['who']} waits for {wait['on']}: {wait['what']} ({wait['seconds']:.0f} s)" for wait in waits]
    ready = ", ".join(f"{role['name']} {role['ready']}/{role['desired']}" for role in status.get("roles", []))
    return f"{now}  {place}: {'; '.join(lines) or f'ready are {ready}'}"


def step_line(metrics: dict[str, Any], total: int, measured: ValidationMetric = ACCURACY) -> str:
    """Return one line with the most important metrics of a step.

    If there are any, the line also has the numbers of dropped groups, of failed validation prompts, of environment processes that took too
    long or died, and of disabled trackers, and says that no sample has a reward. The share of successes is left out while it is 0, because
    most simulators report none.
    """
    parts = [time.strftime("%H:%M:%S"), f"step {metrics['step']}/{total}"]
    columns = (
        ("reward/mean", "reward", 3),
        ("env/success_once", "success", 3),
        (measured.key, f"val {measured.name}", 3),
        ("train/grad_norm", "grad", 3),
        ("perf/tokens_per_second", "tok/s", 0),
        ("perf/env_steps_per_second", "env steps/s", 0),
    )
    failed, prompts = metrics.get("val/errors"), metrics.get("val/prompts")
    coverage = f" over {prompts - failed:.0f} of {prompts:.0f} prompts" if failed and prompts else ""
    for key, name, digits in columns:
        if isinstance(metrics.get(key), int | float) and (metrics[key] or name != "success"):
            parts.append(f"{name} {metrics[key]:.{digits}f}{coverage if key == measured.key else ''}")
    if metrics.get("reward/std") == 0.0 and metrics.get("reward/mean") is not None:
        parts.append("all rewards are equal")
    if metrics.get("reward/missing") and "reward/mean" not in metrics:
        parts.insert(2, "no sample has a reward")
    counts = {
        "ledger/dropped": "dropped",
        "val/errors": "val errors",
        "env/timeouts_total": "env timeouts so far",
        "env/deaths_total": "env deaths so far",
        "trackers/disabled": "disabled trackers",
    }
    for key, name in counts.items():
        if metrics.get(key):
            parts.append(f"{name} {metrics[key]:.0f}")
    if isinstance(metrics.get("time/step"), int | float):
        parts.append(f"{metrics['time/step']:.2f} s")
    return "  ".join(parts)
