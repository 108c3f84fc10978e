"""`DecoupledDecisions`: a rollout decides for its env workers as their observations come, so that a slow one holds up no other.

    env worker -- EnvOutput --> lane --+
    env worker -- EnvOutput --> lane --+--> one decision --> actions to these env workers
    env worker (still steps)    lane

Legend: B simulators, C actions of a chunk.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from rl_core.api.errors import DataError
from rl_core.api.records import ChunkStepResult, EnvOutput
from rl_core.channel.direct import DirectChannel
from rl_core.rollouts.embodied import merge_env_outputs, merge_rows
from rl_core.rollouts.recorder import TrajectoryRecorder
from rl_core.rollouts.served_envs import ServedEnvs

BATCH_SECONDS = 0.02
"""How long a decision waits for further env workers, counted from the first one."""


@dataclass(eq=False, slots=True)
class Lane:
    """One stage of one env worker in a collection. It has one request at a time, so that its decisions keep their order."""

    stage: int
    env: int
    """Index of the env worker in the collection."""
    size: int
    """Number of simulators."""
    recorder: TrajectoryRecorder
    made: int = 0
    """Number of decisions."""


@dataclass(kw_only=True, slots=True)
class DecoupledDecisions:
    """The decisions of one rollout epoch."""

    envs: ServedEnvs
    lanes: Sequence[Lane]
    decisions: int
    """Decisions of each lane."""
    min_batch_size: int
    """Lanes that a decision waits for, at most BATCH_SECONDS."""
    decide: Callable[[EnvOutput], tuple[Tensor, Callable[[], ChunkStepResult]]]
    """Returns the actions for the observations of one or more lanes, and a function that returns the record of the decision.

    The function is called after the actions were sent.
    """
    observe: Callable[[TrajectoryRecorder, EnvOutput], None]
    """Records an output."""
    end: Callable[[TrajectoryRecorder, EnvOutput], None]
    """Records the last output."""
    progress: Callable[[str], None]
    """Counts what was done, by its kind."""
    clock: Callable[[], float] = time.monotonic

    async def run(self, exchange: DirectChannel) -> None:
        """Decide until all lanes have made their decisions and have their last outputs."""
        lanes = list(self.lanes)
        while lanes:
            arrived = [
                (lane, merge_env_outputs([self._output_of(lane, message)], [lane.size]))
                for lane, message in await self._arrived(exchange, lanes)
            ]
            ending = [pair for pair in arrived if pair[0].made == self.decisions]
            if asking := [pair for pair in arrived if pair[0].made < self.decisions]:
                self._decide(exchange, asking)
            for lane, output in ending:
                self.end(lane.recorder, output)
                lanes.remove(lane)

    def _output_of(self, lane: Lane, message: Any) -> EnvOutput:
        return self.envs.output_of(lane.stage, lane.env, message, begins=lane.made == 0)

    async def _arrived(self, exchange: DirectChannel, lanes: Sequence[Lane]) -> list[tuple[Lane, Any]]:
        """Return the lanes that have something to decide, with their messages, in the order of `lanes`; waits for one at least.

        A lane of an env worker that is lost has always something, and its message is None.
        """
        keys = {lane: self.envs.key(lane.stage, lane.env) for lane in lanes}
        lost_lanes = [lane for lane in lanes if lane.env in self.envs.lost]
        waiting = {keys[lane] for lane in lanes if lane not in lost_lanes}
        messages: dict[str, Any] = dict.fromkeys(keys[lane] for lane in lost_lanes)
        if waiting:
            earliest = min((lane for lane in lanes if keys[lane] in waiting), key=lambda lane: lane.made)
            with self.envs.awaiting(earliest.env):
                messages |= await (exchange.get_any(waiting, 0.0) if lost_lanes else exchange.get_any(waiting))
        deadline = self.clock() + BATCH_SECONDS
        while (
            len(messages) < min(self.min_batch_size, len(lanes))
            and (remaining := deadline - self.clock()) > 0
            and (missing := waiting - messages.keys())
        ):
            messages |= await exchange.get_any(missing, remaining)
        return [(lane, messages[key]) for lane, key in keys.items() if key in messages]

    def _decide(self, exchange: DirectChannel, asking: Sequence[tuple[Lane, EnvOutput]]) -> None:
        """Decide for lanes in one batch, and record their outputs while their simulators make the actions."""
        self.progress("decisions")
        parts = [output.obs for _, output in asking]
        sizes = [lane.size for lane, _ in asking]
        actions, record = self.decide(EnvOutput(obs=parts[0] if len(parts) == 1 else merge_rows(parts)))
        if sum(sizes) != len(actions):
            raise DataError(f"actions must be as many as the simulators {sizes}, got {len(actions)}")
        for (lane, _), lane_actions in zip(asking, actions.split(sizes), strict=True):
            self.envs.send_to(lane.env, exchange, lane.stage, lane_actions.numpy())
        for (lane, output), part in zip(asking, split_step(record(), sizes), strict=True):
            self.observe(lane.recorder, output)
            lane.recorder.decide(part)
            lane.made += 1


def split_step(step: ChunkStepResult, sizes: Sequence[int]) -> list[ChunkStepResult]:
    """Return the decision as parts of `sizes` consecutive simulators; their tensors are views."""
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return [
        ChunkStepResult(
            actions=step.actions[begin:end],
            prev_logprobs=step.prev_logprobs[begin:end],
            prev_values=None if step.prev_values is None else step.prev_values[begin:end],
            forward_inputs={name: tensor[begin:end] for name, tensor in step.forward_inputs.items()},
            versions=step.versions,
        )
        for begin, end in pairwise(bounds)
    ]
