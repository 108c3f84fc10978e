"""What runs in SGLang's scheduler processes, one per tensor-parallel rank, before SGLang's own code."""

from __future__ import annotations

from typing import Any


def run(settings: Any, *arguments: Any) -> None:
    """Run SGLang's scheduler with its `ServerArgs` and further arguments. Called in a process of its own."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    if settings.device == "cpu" and settings.enable_lora:
        from rl_core.rollouts.sglang.cpu import pinning

        pinning.disable()
    run_scheduler_process(settings, *arguments)
