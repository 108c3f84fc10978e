"""What runs in SGLang's scheduler processes, one per tensor-parallel rank, before SGLang's own code."""

from __future__ import annotations

import os
from typing import Any


def run(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler. Called in a process of its own."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from rl_core.rollouts.sglang.cpu import pinning

        pinning.disable()
    run_scheduler_process(*args, **kwargs)
