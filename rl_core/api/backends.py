"""Training backends and generation engines by the name that a job gives them: the worker class of each.

To add a backend or an engine, write its worker class in a folder of its own and add one line here: the schema, the launch plan and the
runner read these tables.
"""

from collections.abc import Mapping

TRAINERS: Mapping[str, str] = {
    "fsdp1": "rl_core.actors.fsdp.actor:FSDPActor",
    "fsdp2": "rl_core.actors.fsdp.actor:FSDPActor",
    "megatron": "rl_core.actors.megatron.actor:MegatronActor",
}
"""`actor.backend` -> worker class, `module:Class`."""
ENGINES: Mapping[str, str] = {
    "hf": "rl_core.rollouts.hf.worker:HFRolloutWorker",
    "sglang": "rl_core.rollouts.sglang.worker:SGLangWorker",
}
"""`rollout.engine` -> worker class, `module:Class`."""
EMBODIED_PROGRAMS = ("embodied", "embodied_async")
"""Values of `program` with which the policy acts in simulators."""
MOST_ENGINE_PROCESSES = 64
"""Largest `tp_size` of `rollout.engineArgs`, and the largest number of engines of a pod."""
