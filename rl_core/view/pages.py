"""Answers the requests of the page from the files of the runs. Called on the server's thread, one request at a time."""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from rl_core.api.validation_metric import stored_validation_metric
from rl_core.launch.workspace import is_abandoned, stored_job
from rl_core.samples.lines import TRAIN, VALIDATION, Entry
from rl_core.samples.reader import SampleReader
from rl_core.view.metrics import MetricColumns
from rl_core.view.timeline import timeline

STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in
       ("app", "charts", "dom", "samples", "timeline", "tokens")},
    "/view.css": ("view.css", "text/css; charset=utf-8"),
}  # fmt: skip
MOST_SAMPLES = 400
"""Samples of one answer."""
PREVIEW = 240
"""Characters of a text in a list."""
FINAL = frozenset({"Finished", "Failed", "Suspended"})


class NotFound(ValueError):
    """A request for something that does not exist."""


class RunView:
    """One run as the page shows it."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name` is what the page calls the run in `folder`."""
        self.folder, self.name = folder, name
        self.metrics = MetricColumns(folder / "metrics.jsonl")
        self.samples = SampleReader(folder)
        self._measured: tuple[dict[str, Any], str] | None = None

    def measured(self) -> str:
        """Return the metric of what validation of the job measures; the accuracy if the folder has no job."""
        job = stored_job(self.folder)
        if self._measured is None or self._measured[0] != job:
            self._measured = (job, stored_validation_metric(job).key)
        return self._measured[1]

    def facts(self) -> dict[str, Any]:
        """Return name, phase and progress; a run that never wrote a status is Unknown."""
        status = _read_json(self.folder / "status.json")
        phase = str(status.get("phase", "Unknown"))
        if phase not in (*FINAL, "Unknown") and is_abandoned(self.folder):
            phase = "Killed"
        failure = status.get("failure")
        return {
            "name": self.name,
            "folder": str(self.folder),
            "phase": phase,
            "step": status.get("step"),
            "total": status.get("totalSteps"),
            "reward": status.get("reward"),
            "epoch": status.get("epoch"),
            "failure": failure.get("message") if isinstance(failure, dict) else None,
            "groups": status.get("promptsPerStep"),
            "measured": self.measured(),
        }


class Pages:
    """The runs of one `rljob view`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._runs = [RunView(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
        self._static = {
            path: (files("rl_core.view").joinpath("static", name).read_bytes(), kind)
            for path, (name, kind) in STATIC.items()
        }
        self._answers: Mapping[str, Callable[[Query], Any]] = {
            "/api/runs": lambda query: [run.facts() for run in self._runs],
            "/api/curves": self._curves,
            "/api/steps": self._steps,
            "/api/samples": self._samples,
            "/api/sample": self._sample,
            "/api/timeline": lambda query: timeline(self._run(query).folder / "traces", query.number("step")),
        }

    def answer(self, path: str, query: str) -> tuple[bytes, str]:
        """Return the body and its content type. Raises NotFound, or ValueError for a bad parameter."""
        if path in self._static:
            return self._static[path]
        if path not in self._answers:
            raise NotFound(f"{path[:80]} is not known")
        value = self._answers[path](Query(query))
        body = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
        return body, "application/json"

    def _run(self, query: "Query") -> RunView:
        run_index = query.number("run")
        if not 0 <= run_index < len(self._runs):
            raise NotFound(f"there are runs 0 to {len(self._runs) - 1}, got {run_index}")
        return self._runs[run_index]

    def _curves(self, query: "Query") -> dict[str, Any]:
        metrics = self._run(query).metrics
        return {
            "names": metrics.names(),
            "series": {name: metrics.series(name) for name in query.texts("name")[:32]},
            "hours": metrics.hours(),
            "events": metrics.events(),
        }

    def _steps(self, query: "Query") -> dict[str, list[int]]:
        samples = self._run(query).samples
        samples.refresh()
        return {split: samples.steps(split) for split in (TRAIN, VALIDATION)}

    def _samples(self, query: "Query") -> dict[str, Any]:
        run, step, split = self._run(query), query.optional("step"), query.text("split", TRAIN)
        run.samples.refresh()
        records = run.samples.every(split) if step is None else run.samples.of_step(split, int(step))
        reasons = sorted({record.entry.reason for record in records})
        matches = _filter(query)
        records = [record for record in records if matches(record.entry)]
        order = query.text("order", "group")
        if order in ("worst", "best"):
            records = sorted(records, key=lambda record: _rank(record.entry, best=order == "best"))
        elif order in ("longest", "shortest"):
            records = sorted(records, key=lambda record: record.entry.tokens, reverse=order == "longest")
        text = query.text("text", "")
        matching = run.samples.containing(records, text)
        rows = [_row(record.entry, sample) for record, sample in islice(matching, MOST_SAMPLES)]
        num_more = 0
        if len(rows) == MOST_SAMPLES:
            num_more = (-1 if next(matching, None) else 0) if text else len(records) - MOST_SAMPLES
        return {"samples": rows, "more": num_more, "reasons": reasons}

    def _sample(self, query: "Query") -> bytes:
        run, split = self._run(query), query.text("split", TRAIN)
        key = query.text("group", ""), query.number("sample")
        run.samples.refresh()
        for record in run.samples.of_step(split, query.number("step")):
            if (record.entry.group, record.entry.sample) == key:
                data = run.samples.read_bytes(record)
                if data is not None and run.samples.read(record) is not None:
                    return data
        raise NotFound(f"sample {key[1]} of group {key[0][:80]} is not kept")


class Query:
    """The parameters of a request."""

    def __init__(self, text: str) -> None:
        self._values = parse_qs(text, max_num_fields=64)

    def texts(self, name: str) -> list[str]:
        """Return all values of a parameter."""
        return self._values.get(name, [])

    def text(self, name: str, default: str) -> str:
        """Return a parameter, `default` where it is missing or empty."""
        return (self._values.get(name) or [default])[0] or default

    def optional(self, name: str) -> float | None:
        """Return the parameter `name` as a number; None if it is missing or empty. Raises ValueError for other text."""
        text = self.text(name, "")
        try:
            return float(text) if text else None
        except ValueError:
            raise ValueError(f"{name} must be a number, got {text[:40]!r}") from None

    def number(self, name: str) -> int:
        """Return the parameter `name` as an integer; 0 if it is missing. Raises ValueError for other text."""
        text = self.text(name, "0")
        if not (text.isascii() and text.isdigit()) or len(text) > 12:
            raise ValueError(f"{name} must be a number, got {text[:40]!r}")
        return int(text)


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return for each folder the shortest end of its path that no other folder has."""
    names = []
    for folder in folders:
        other_parts = [other_folder.parts for other_folder in folders if other_folder != folder]
        count = 1
        while count < len(folder.parts) and any(parts[-count:] == folder.parts[-count:] for parts in other_parts):
            count += 1
        names.append(str(Path(*folder.parts[-count:])))
    return names


def _rank(entry: Entry, *, best: bool) -> tuple[bool, float]:
    """Return a sort key; samples without a reward are last."""
    return entry.reward is None, (-1 if best else 1) * (entry.reward or 0.0)


def _filter(query: Query) -> Callable[[Entry], bool]:
    """Return whether a sample has the reward, length, reason and group that `query` asks for."""
    low, high = query.optional("min_reward"), query.optional("max_reward")
    min_tokens, max_tokens = query.optional("min_tokens"), query.optional("max_tokens")
    reason, group = query.text("reason", ""), query.text("group", "")

    def matches(entry: Entry) -> bool:
        if (low is not None or high is not None) and entry.reward is None:
            return False
        reward = entry.reward or 0.0
        return (
            (low is None or reward >= low)
            and (high is None or reward <= high)
            and (min_tokens is None or entry.tokens >= min_tokens)
            and (max_tokens is None or entry.tokens <= max_tokens)
            and reason in ("", entry.reason)
            and group in ("", entry.group)
        )

    return matches


def _row(entry: Entry, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of a list."""
    num_prompt = sample["prompt_messages"]
    prompt, response = (
        "\n".join(str(message["content"]) for message in part)
        for part in (sample["messages"][:num_prompt], sample["messages"][num_prompt:])
    )
    return {
        "step": entry.step,
        "group": entry.group,
        "sample": entry.sample,
        "reward": entry.reward,
        "reason": entry.reason,
        "tokens": entry.tokens,
        "version": entry.version,
        "prompt": prompt[:PREVIEW],
        "response": response[:PREVIEW],
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
