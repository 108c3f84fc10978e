"""Who did what and who waited in a step, read from the trace of a run (`traces/`, rl_core/runner/trace.py)."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

NAME = re.compile(r"e(\d+)-s(\d+)\.json")
MOST_SPANS = 4000
"""Spans of a step that are returned."""


def timeline(folder: Path, step: int) -> dict[str, Any]:
    """Return {"began", "ended", "lanes"} of `step`: seconds since 1970, and per process its rows of [name, began, ended, args] spans.

    The lanes are empty when no trace has the step.
    """
    files = sorted((int(m[1]), int(m[2]), path) for path in folder.glob("*.json") if (m := NAME.fullmatch(path.name)))
    # A file holds the steps from the one in its name on; of several epochs the last one that reached the step counts.
    for _, _, path in sorted((entry for entry in files if entry[1] <= step), reverse=True):
        lanes_of_step = _of_step(path, step)
        if lanes_of_step["lanes"]:
            return lanes_of_step
    return {"began": 0.0, "ended": 0.0, "lanes": []}


def _of_step(path: Path, step: int) -> dict[str, Any]:
    try:
        events = _events(path, path.stat().st_size)
    except OSError:
        return {"began": 0.0, "ended": 0.0, "lanes": []}
    processes: dict[int, str] = {}
    groups: set[str] = set()
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event.get("args", {}).get("step") == step and "group" in event["args"]:
            groups.add(event["args"]["group"])
    open_until: dict[tuple[int, int], int] = {}
    spans: list[tuple[int, int, str, float, float, dict[str, Any]]] = []
    for event in events:
        if event["ph"] != "X":
            continue
        row, end, args = (event["pid"], event["tid"]), event["ts"] + event["dur"], event.get("args", {})
        is_of_step = args.get("step") == step or args.get("group") in groups
        is_nested = not args and end <= open_until.get(row, -1)
        if is_of_step:
            open_until[row] = end
        elif args:
            open_until.pop(row, None)
        if is_of_step or is_nested:
            spans.append((*row, event["name"], event["ts"] / 1e6, end / 1e6, args))
    lanes: dict[int, dict[int, list[list[Any]]]] = {}
    for process, thread, name, began, ended, args in spans[:MOST_SPANS]:
        lanes.setdefault(process, {}).setdefault(thread, []).append([name, began, ended, args])
    began = min((span[3] for span in spans), default=0.0)
    return {
        "began": began,
        "ended": max((span[4] for span in spans), default=0.0),
        "lanes": [
            {"name": processes.get(process, str(process)), "rows": [rows[thread] for thread in sorted(rows)]}
            for process, rows in sorted(lanes.items())
        ],
    }


@lru_cache(maxsize=4)
def _events(path: Path, size: int) -> list[dict[str, Any]]:
    """Return the events in the first `size` bytes of a trace; lines that are not whole are left out."""
    events = []
    with path.open("rb") as file:
        for line in file.read(size).splitlines():
            try:
                event = json.loads(line.rstrip(b", "))
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("ph"), str):
                events.append(event)
    return events
