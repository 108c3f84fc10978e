"""The chart, a job that it is tried with, and patience for what the control plane takes up within a second or so."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[3] / "helm" / "rljob"
PATIENCE = 180.0


def job(name: str = "job", **spec: Any) -> dict[str, Any]:
    """Return a job with `spec` over a minimal one."""
    needed = {"model": {"path": "/m"}, "data": {"train": "/d.jsonl"}}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": needed | spec}


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until the control plane has taken up what was written."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"the control plane did not take it up within {PATIENCE:.0f} s"
        time.sleep(0.2)
