"""Output folders as a run leaves them, for tests of the page."""

import json

from rl_core.observability.traces import TraceEvents, TraceRows
from rl_core.samples.lines import VALIDATION
from tests.unit.samples.kept import kept, write


def make_run(folder, *, steps=3, groups=2, samples=3, text="answer"):
    """Write metrics, status, a trace and samples of a run of `steps` steps; return the folder."""
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {
                "step": step,
                "epoch": int(step > 2),
                "reward/mean": step / 10,
                "time/step": 3600.0,
                "val/accuracy": None,
            }
            line |= {"failures_total/rollout/worker_lost": 1.0} if step > 1 else {}
            file.write(json.dumps(line) + "\n")
    (folder / "status.json").write_text(
        json.dumps({"phase": "Finished", "step": steps, "totalSteps": steps, "epoch": 0})
    )
    writer = None
    for step in range(1, steps + 1):
        kept_samples = [
            kept(f"0-{group}", index, reward=float(index), text=f"{text} {group} {index}", reason="length" if index else "stop")
            for group in range(groups) for index in range(samples)
        ]  # fmt: skip
        writer = write(folder, kept_samples, step=step, writer=writer)
    write(folder, [kept("val-0", 0, reward=float("nan"), reason="error")], step=steps, split=VALIDATION, writer=writer)
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    rows = TraceRows()
    events = TraceEvents(rows)
    for step in (1, 2):
        args = {"step": step, "version": step}
        events.span(rows.row("runner", 1, "loop"), "step", 100.0 * step, 100.0 * step + 10, args)
        row = rows.row("rollout:0", 1, "sample 1")
        events.span(row, f"0-{step}_g0", 100.0 * step, 100.0 * step + 4, {"group": f"0-{step}", "sample": 0})
        events.span(row, "generate", 100.0 * step + 1, 100.0 * step + 3)
        events.span(
            rows.row("actor", 1, "group 1"),
            f"0-{step}",
            100.0 * step + 4,
            100.0 * step + 9,
            args | {"group": f"0-{step}"},
        )
    (traces / "e0000-s0000001.json").write_text("[\n" + events.text() + '{"ph":"X","torn')
    return folder
