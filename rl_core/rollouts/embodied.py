"""What a rollout of an embodied program computes beside its policy: outputs of several env workers merged, rewards with bootstraps. Pure.

Legend: B simulators, C actions of a chunk, T decisions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.api.errors import DataError, InfrastructureError
from rl_core.api.records import EnvOutput, Trajectory, record_of

FLAGS = ("rewards", "terminations", "truncations", "dones")
"""Fields that all shards of an output have, or none."""
ARRAYS = tuple(one.name for one in fields(EnvOutput) if one.name != "final_info")


def merge_env_outputs(shards: Sequence[EnvOutput | Mapping[str, Any]], sizes: Sequence[int]) -> EnvOutput:
    """Concatenate the outputs of env workers along the simulators, as tensors on the CPU. Lists are joined.

    A shard may be a mapping of the fields of EnvOutput. Observations may be nested mappings, and None if all shards have none. If only some
    shards have an optional field, it is filled in the others: `final_obs` with `obs`, `sub_steps` with C, `intervene_actions` with 0,
    `intervene_flags` and `lost` with False. `env_ids` is None unless all shards have it. Raises DataError for wrong fields and for a size
    other than that in `sizes`, and ValueError if only some shards have rewards or flags of ends.
    """
    outputs = [record_of(EnvOutput, shard) for shard in shards]
    for shard, size in zip(outputs, sizes, strict=True):
        rows = _rows(shard.obs)
        if rows is None:
            rows = len(shard.dones)
        if rows != size:
            raise DataError(f"an env worker must send {size} observations, got {rows}; env and rollout must agree")
    if len(outputs) == 1:
        found = {name: tensors_of(getattr(outputs[0], name)) for name in ARRAYS}
        return EnvOutput(**found, final_info=outputs[0].final_info or None)
    merged: dict[str, Any] = {"obs": merge_rows([shard.obs for shard in outputs])}
    for name in FLAGS:
        values = [getattr(shard, name) for shard in outputs]
        if any(value is None for value in values) and not all(value is None for value in values):
            raise ValueError(f"{name} must be given by all env workers or by none, got it from some")
        merged[name] = None if values[0] is None else merge_rows(values)
    merged["final_obs"] = _filled([shard.final_obs for shard in outputs], [shard.obs for shard in outputs])
    width = 0 if merged["rewards"] is None else merged["rewards"].shape[1]
    for name, empty in (("intervene_actions", 0), ("intervene_flags", False), ("lost", False), ("sub_steps", width)):
        values = [getattr(shard, name) for shard in outputs]
        template = next((tensor_of(value) for value in values if value is not None), None)
        if template is None:
            merged[name] = None
        else:
            shapes = [(size, *template.shape[1:]) for size in sizes]
            filled = [
                torch.full(shape, empty, dtype=template.dtype) if value is None else tensor_of(value)
                for value, shape in zip(values, shapes, strict=True)
            ]
            merged[name] = torch.cat(filled)
    ids = [shard.env_ids for shard in outputs]
    merged["env_ids"] = merge_rows(ids) if all(part is not None for part in ids) else None
    infos = [info for shard in outputs for info in shard.final_info or ()]
    return EnvOutput(**merged, final_info=infos or None)


def lost_output(latest: EnvOutput | None, width: int, *, begins: bool = False) -> EnvOutput:
    """Return a placeholder for an output of C = `width` actions of a lost env worker, with the observations of its output `latest`.

    Each episode is truncated in the last column, has reward 0 and no sub-steps, and is marked as lost. With `begins` the output is the first
    of a rollout epoch: it has no rewards, its flags are [B, 1], and no episode is marked as lost. Raises InfrastructureError if `latest` is
    None.
    """
    if latest is None:
        raise InfrastructureError("an env worker was lost before its first observations; the collection is run again")
    count = len(latest.dones)
    if begins:
        all_false = np.zeros((count, 1), bool)
        return EnvOutput(
            obs=latest.obs, terminations=all_false, truncations=~all_false, dones=~all_false, env_ids=latest.env_ids
        )
    all_false, truncations = np.zeros((count, width), bool), np.zeros((count, width), bool)
    truncations[:, -1] = True
    return EnvOutput(
        obs=latest.obs,
        rewards=np.zeros((count, width), np.float32),
        terminations=all_false,
        truncations=truncations,
        dones=truncations.copy(),
        sub_steps=np.zeros(count, np.int64),
        lost=np.ones(count, bool),
        env_ids=latest.env_ids,
    )


def bootstrap_rewards(
    rewards: Tensor,
    values: Tensor | None,
    truncations: Tensor,
    dones: Tensor,
    *,
    gamma: float,
    terminations: Tensor | None = None,
    bootstrap_type: str = "standard",
) -> Tensor:
    """Return `rewards` [B, C], with gamma times the value of the final observation added where an episode was cut.

    `values` [B, 1 or more] are those of the final observations, of which the first column counts; None adds nothing. An end counts in
    the last column. standard: episodes that were truncated and did not terminate; always: every end; none: no end.
    `terminations` None: an episode that was truncated did not terminate.
    """
    result = rewards.detach().clone().cpu().contiguous()
    if values is None or bootstrap_type == "none":
        return result
    terminated = torch.zeros_like(dones[:, -1]) if terminations is None else terminations[:, -1]
    bootstrapped = dones[:, -1] if bootstrap_type == "always" else truncations[:, -1] & ~terminated
    last_values = values.detach().cpu().float().reshape(len(values), -1)[:, 0]
    result[:, -1] += torch.where(bootstrapped.cpu(), gamma * last_values, 0.0)
    return result


def tensor_of(value: Any) -> Tensor:
    """Return an array of numpy or torch as a tensor on the CPU."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.c_contiguous else np.ascontiguousarray(value))
    return value if type(value) is Tensor and value.is_cpu and not value.requires_grad else value.detach().cpu()


def tensors_of(value: Any) -> Any:
    """Return an array, or the arrays in a mapping, as tensors on the CPU. Lists and None are returned as they are."""
    return for_arrays(value, tensor_of)


def for_arrays(value: Any, function: Callable[[Any], Tensor]) -> Any:
    """Return `value` with `function` applied to it, or to each array in it if it is a mapping. Lists and None are returned as they are."""
    if value is None or isinstance(value, list):
        return value
    if isinstance(value, np.ndarray | Tensor):
        return function(value)
    return {name: for_arrays(part, function) for name, part in value.items()}


def host_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, without gradient."""
    return tensor if tensor.device.type == "cpu" and not tensor.requires_grad else tensor.detach().cpu()


def host_result(
    given: dict[str, Tensor], obs: dict[str, Tensor], actions: Tensor, result: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return what `predict` of a policy returned, on the CPU. `obs` are the observations `given` on the device of the policy."""
    values = result.get("prev_values")
    return host_tensor(actions).contiguous(), {
        "prev_logprobs": host_tensor(result["prev_logprobs"]).float(),
        "prev_values": None if values is None else host_tensor(values).float(),
        "forward_inputs": {
            name: given[name] if tensor is obs.get(name) else host_tensor(tensor)
            for name, tensor in result["forward_inputs"].items()
        },
    }


def cut_trajectory(trajectory: Trajectory, parts: int, *, group: int = 1) -> list[Trajectory]:
    """Return the trajectory as `parts` of consecutive simulators, in groups of `group` that are not cut; sizes as equal as possible."""
    if parts == 1:
        return [trajectory]
    columns = torch.arange(trajectory.rewards.shape[1]).reshape(-1, group).tensor_split(parts)
    return [_columns(trajectory, indices.flatten(), part) for part, indices in enumerate(columns)]


def _columns(trajectory: Trajectory, indices: Tensor, part: int) -> Trajectory:
    def cut(tensor: Tensor) -> Tensor:
        return tensor.index_select(1, indices)

    return Trajectory(
        actions=cut(trajectory.actions),
        prev_logprobs=cut(trajectory.prev_logprobs),
        prev_values=cut(trajectory.prev_values),
        rewards=cut(trajectory.rewards),
        dones=cut(trajectory.dones),
        terminations=cut(trajectory.terminations),
        truncations=cut(trajectory.truncations),
        forward_inputs={name: cut(tensor) for name, tensor in trajectory.forward_inputs.items()},
        sub_steps=cut(trajectory.sub_steps),
        valid=cut(trajectory.valid),
        env_ids=trajectory.env_ids[indices],
        versions=trajectory.versions,
        sender=trajectory.sender,
        stage=trajectory.stage,
        part=part,
        intervene_flags=None if trajectory.intervene_flags is None else cut(trajectory.intervene_flags),
    )


def _rows(value: Any) -> int | None:
    """Return the number of rows of the first array or list in `value`; None if it has none."""
    if isinstance(value, Mapping):
        return next((rows for part in value.values() if (rows := _rows(part)) is not None), None)
    return None if value is None else len(value)


def merge_rows(values: Sequence[Any]) -> Any:
    """Return the rows of arrays as one tensor, those of lists as one list, and those of mappings by name; None if all are None."""
    if isinstance(values[0], Mapping):
        return {name: merge_rows([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], list):
        return [entry for value in values for entry in value]
    if all(value is None for value in values):
        return None
    return torch.cat([tensor_of(value) for value in values])


def _filled(values: Sequence[Any], instead: Sequence[Any]) -> Any:
    """Return the merged values, `instead` where a shard has none; None where no shard has any."""
    if all(value is None for value in values):
        return None
    return merge_rows([default if value is None else value for value, default in zip(values, instead, strict=True)])
