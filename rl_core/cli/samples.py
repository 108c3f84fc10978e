"""`rljob samples`: prints kept completions of a run."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.cli.local_view import read_status
from rl_core.samples.lines import FILTERED, TRAIN, VALIDATION
from rl_core.samples.printing import explain_reasons, render_sample
from rl_core.samples.reader import Found, SampleReader, worst_first

RETRIES = (
    "Attempts that failed and were repeated, such as a reward call that was killed, have no sample: see `trying again` in the logs\n"
    "of the rollouts and rollout/redispatch_total in metrics.jsonl.\n"
)
"""Text that `--failed` prints about the failures that it does not show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which samples to print. Without `worst`, `best`, `failed` and `filtered`: the samples of one step, in their order."""

    step: int | None = None
    """Step; None = the newest that has samples, or all steps with `worst`, `best`, `failed`, `filtered` or `group`."""
    group: str | None = None
    validation: bool = False
    worst: bool = False
    best: bool = False
    failed: bool = False
    filtered: bool = False
    limit: int = 8


def show_samples(folder: Path, choice: Choice) -> int:
    """Print the samples of the run in `folder` that `choice` asks for; return 0. Raises ConfigError when there are none."""
    if choice.worst + choice.best + choice.failed + choice.filtered > 1:
        raise ConfigError("samples takes one of --worst, --best, --failed and --filtered, got several; choose one")
    if not (folder / "samples").is_dir():
        read_status(folder)  # raises when `folder` is no output folder
    reader = SampleReader(folder)
    reader.refresh()
    records = select(reader, choice)
    condition = "failed" if choice.failed else "was filtered by dynamic sampling" if choice.filtered else None
    if not records and condition and select(reader, replace(choice, failed=False, filtered=False)):
        sys.stdout.write(
            f"none of these samples {condition}; {_known(reader, choice)}\n{RETRIES if choice.failed else ''}"
        )
        return 0
    if not records:
        raise ConfigError(f"{folder} must hold samples that match, got none; {_known(reader, choice)}")
    selected = records[: choice.limit]
    for record in selected:
        sample = reader.read(record)
        if sample is not None:
            sys.stdout.write(render_sample(sample).encode(errors="replace").decode() + "\n")
    sys.stdout.write(explain_reasons(record.entry.reason for record in selected))
    if len(records) > choice.limit:
        sys.stdout.write(f"{len(records) - choice.limit} more; --limit {len(records)} prints all\n")
    if choice.failed:
        sys.stdout.write(RETRIES)
    return 0


def select(reader: SampleReader, choice: Choice) -> list[Found]:
    """Return the samples that `choice` asks for, in the order in which they are printed."""
    split = _split(choice)
    wide = choice.worst or choice.best or choice.failed or choice.filtered or choice.group is not None
    if choice.step is not None:
        records = reader.of_step(split, choice.step)
    elif wide:
        records = reader.every(split)
    else:
        steps = reader.steps(split)
        records = reader.of_step(split, steps[-1]) if steps else []
    if choice.group is not None:
        records = [record for record in records if record.entry.group == choice.group]
    if choice.failed:
        return [record for record in records if record.entry.reward is None or record.entry.reason == "error"]
    if choice.filtered:
        return [record for record in records if record.entry.reason == FILTERED]
    if choice.worst or choice.best:
        ordered = worst_first(records)
        return ordered if choice.worst else ordered[::-1]
    return records


def _split(choice: Choice) -> str:
    return VALIDATION if choice.validation else TRAIN


def _known(reader: SampleReader, choice: Choice) -> str:
    steps = reader.steps(_split(choice))
    if not steps:
        return "the job keeps none (spec.samples), or no step has ended yet"
    return f"steps with samples: {steps[0]} to {steps[-1]}"
