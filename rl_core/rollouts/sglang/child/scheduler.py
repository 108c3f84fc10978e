"""What runs in SGLang's scheduler processes, one per tensor-parallel rank, before SGLang's own code.

SGLang's requests reach every process of the engine; three of them are served here:

- `update_weights_from_tensor` loads the tensors in the request, and records where they are loaded. If the request has a `SourceLoad`
  instead, each process reads the tensors from that source.
- `end_weight_update` runs SGLang's own code, and notes whether that writes to parameters.
- `check_weights` with the action of `pieces_action` returns the checksums of these places, and the report of the last load from a source.

The prefix cache is keyed by the version of the weights: see `_key_cache_by_version`.
"""

from __future__ import annotations

import json
from typing import Any

from rl_core.rollouts.sglang.child import stages

PIECES = "pieces"
REPORT = "report"
"""Key of the report, in JSON, among the checksums."""
SOURCE = "source"
"""Key of a request with a `SourceLoad`; its value is the encoded message."""


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
    _key_cache_by_version()
    stages.tell("the scheduler builds the model and the KV cache")
    run_scheduler_process(settings, *arguments)


def _record_loads() -> None:
    """Let SGLang load weights by way of a `LoadedLayout`, and its weight checker answer for it. Changes this process only."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from rl_core.messages.engine import SourceLoad
    from rl_core.rollouts.sglang.child.layout import LoadedLayout
    from rl_core.rollouts.sglang.child.source_loader import LoadReport, SourceLoader
    from rl_core.transports import frames

    layout = LoadedLayout()
    handle, end = WeightChecker.handle, WeightUpdater.end_weight_update
    loaders: list[SourceLoader] = []
    reports: list[LoadReport] = []
    """That of the last load from a source, until it is asked for."""

    def load_source(updater: Any, request: SourceLoad) -> tuple[bool, str]:
        device = updater.device if updater.device == "cpu" else f"{updater.device}:{updater.gpu_id}"
        if not loaders:
            loaders.append(
                SourceLoader(layout, rank=updater.tp_rank, device=device, seconds=request.collective_seconds)
            )
        reports[:] = [loaders[0].load(updater.get_model(), request)]
        return not reports[0]["error"], reports[0]["error"]

    def load(updater: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> tuple[bool, str]:
        if SOURCE in flattened_tensor_bucket_dict:
            return load_source(updater, frames.decode(flattened_tensor_bucket_dict[SOURCE]))
        tensors = FlattenedTensorBucket(**flattened_tensor_bucket_dict).reconstruct_tensors()
        layout.record(updater.get_model(), tensors)
        return True, "Success"

    def end_watched(updater: Any, *, run_post_load: bool) -> None:
        with layout.watch():
            end(updater, run_post_load=run_post_load)

    def check(checker: Any, action: str, *args: Any, role: str, **kwargs: Any) -> Any:
        if not action.startswith(PIECES):
            return handle(checker, action, *args, role=role, **kwargs)
        turn, turns = map(int, action.split(":")[1:])
        checksums = layout.checksums(checker._get_model(), turn=turn, turns=turns)
        if reports:
            checksums[REPORT] = json.dumps(reports.pop())
        return {
            "checksums": checksums,
            "per_gpu_checksum": "",
            "parallelism_info": checker._parallelism_info(role=role).model_dump(),
        }

    WeightUpdater._update_weights_from_flattened_bucket = load
    WeightUpdater.end_weight_update = end_watched
    WeightChecker.handle = check


def _key_cache_by_version() -> None:
    """Have every request use the part of SGLang's prefix cache that belongs to the weights with which it is prefilled.

    `Req.extra_key` names that part. It is set when a request enters the waiting queue, and again when the version changes while it waits
    there: its keys and values will then be computed with the new weights. A request that is in the batch at an update that keeps the caches
    stays with the earlier version's part, because that is where its first keys and values are. The parts of earlier versions are evicted as
    the least recently used ones. The adapters of a job with LoRA are such keys already. Changes this process only.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving

    enqueue, change = Scheduler._add_request_to_queue, Scheduler.record_weight_version_change

    def set_key(request: Any) -> None:
        if request.lora_id is None:
            request.extra_key = get_serving().weight_version

    def enqueue_with_key(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
        set_key(req)
        enqueue(scheduler, req, is_retracted)

    def change_with_keys(scheduler: Any, new_version: str | None) -> None:
        change(scheduler, new_version)
        for req in scheduler.waiting_queue:
            set_key(req)

    Scheduler._add_request_to_queue = enqueue_with_key
    Scheduler.record_weight_version_change = change_with_keys
