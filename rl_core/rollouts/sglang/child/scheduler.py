"""What runs in SGLang's scheduler processes, one per tensor-parallel rank, before SGLang's own code.

Records where weights are loaded, and answers the action of `pieces_action` of SGLang's weight checker with the checksums of these places.
"""

from __future__ import annotations

from typing import Any

PIECES = "pieces"


def pieces_action(turn: int, turns: int) -> str:
    """Return the action that asks each rank for the checksums of `LoadedLayout.checksums`."""
    return f"{PIECES}:{turn}:{turns}"


def run(settings: Any, *arguments: Any) -> None:
    """Run SGLang's scheduler with its `ServerArgs` and further arguments. Called in a process of its own."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    if settings.device == "cpu" and settings.enable_lora:
        from rl_core.rollouts.sglang.cpu import pinning

        pinning.disable()
    _record_loads()
    run_scheduler_process(settings, *arguments)


def _record_loads() -> None:
    """Let SGLang load weights by way of a `LoadedLayout`, and its weight checker answer for it. Changes this process only."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from rl_core.rollouts.sglang.child.layout import LoadedLayout

    layout = LoadedLayout()
    handle = WeightChecker.handle

    def load(updater: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> tuple[bool, str]:
        tensors = FlattenedTensorBucket(**flattened_tensor_bucket_dict).reconstruct_tensors()
        layout.record(updater.get_model(), tensors)
        return True, "Success"

    def check(checker: Any, action: str, *args: Any, role: str, **kwargs: Any) -> Any:
        if not action.startswith(PIECES):
            return handle(checker, action, *args, role=role, **kwargs)
        turn, turns = map(int, action.split(":")[1:])
        return {
            "checksums": layout.checksums(checker._get_model(), turn=turn, turns=turns),
            "per_gpu_checksum": "",
            "parallelism_info": checker._parallelism_info(role=role).model_dump(),
        }

    WeightUpdater._update_weights_from_flattened_bucket = load
    WeightChecker.handle = check
