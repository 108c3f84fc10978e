"""`GymnasiumVectorEnv`: B simulators that are stepped together, by chunks of actions.

If a simulator raises, hangs or dies, only its own open episode is lost: it is replaced by another one, which begins a new episode, and its
row of the output is marked as `lost`. The other simulators continue.

Legend: B simulators, C actions of a chunk.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_core.api.errors import RolloutDataFailure
from rl_core.api.records import EnvOutput
from rl_core.envs.simulator_messages import Request
from rl_core.envs.slots import LocalSlots, Outcome, ProcessSlots, Slots
from rl_core.messages.embodied import SimulatorAnswer, SimulatorChunk, SimulatorReset, SimulatorSettings
from rl_core.transports.shared_rows import ColumnAddress, final_row

logger = logging.getLogger(__name__)
MOST_FAILURES = 5
"""Number of consecutive failures of a simulator, without a chunk of actions in between, after which the run ends with an error."""
SeedOf = Callable[[int, int], int]
"""Returns the seed of an episode: (number of the simulator in this environment, number of the episode)."""


@dataclass(slots=True)
class _Episode:
    """The open episode of a slot."""

    obs: dict[str, np.ndarray] = field(default_factory=dict)
    total: float = 0.0
    """Sum of the rewards of the episode."""
    length: int = 0
    success_once: bool = False
    success_at_end: bool = False
    resting: tuple[bool, bool] | None = None
    """(terminated, truncated) if the episode has ended and no other one has begun; else None."""
    frames: list[np.ndarray] = field(default_factory=list)
    """Images of the episode; empty if it is not recorded."""


class GymnasiumVectorEnv:
    """Steps `num_envs` simulators of one gymnasium id or of one class of the user."""

    def __init__(
        self,
        id: str,
        num_envs: int,
        *,
        auto_reset: bool = True,
        vectorization: str = "sync",
        seed_of: SeedOf | None = None,
        settings: SimulatorSettings | None = None,
        start_seconds: float = 120.0,
        step_seconds: float = 60.0,
        **kwargs: Any,
    ) -> None:
        """Build the simulators.

        - `id`: a gymnasium id, or `module:Class`; `kwargs` are its arguments.
        - `auto_reset`: begin the next episode where one ends. Otherwise a simulator rests with reward 0 until `reset`.
        - `vectorization`: process (a child process per simulator) or sync (in this process).
        - `seed_of`: seeds of the episodes; None derives them from the argument of `reset`.
        - `settings`: further settings of the processes.
        - `start_seconds`, `step_seconds`: time for a child process to be ready, and to answer.

        Raises ConfigError when a simulator cannot be built, and ValueError for another `vectorization`.
        """
        if vectorization not in ("process", "sync"):
            raise ValueError(f"vectorization must be process or sync, got {vectorization!r}; choose one")
        base = settings or SimulatorSettings(id=id, kwargs=kwargs, auto_reset=auto_reset, label=f"simulator {id}")
        self._slots: Slots = (
            LocalSlots(base, num_envs)
            if vectorization == "sync"
            else ProcessSlots(base, num_envs, start_seconds=start_seconds, step_seconds=step_seconds)
        )
        self.num_envs, self.auto_reset = num_envs, auto_reset
        self._ends_together = base.ignore_terminations and not auto_reset
        self._restarted: set[int] = set()
        """Slots whose simulator was replaced since the last reset."""
        self._seed_of = seed_of or self._derived_seed
        self._seed = 0
        self._num_episodes = [0] * num_envs
        """Number of episodes that each slot has begun."""
        self._next_seeds: list[int | None] = [None] * num_envs
        """Seed of the next episode of each slot, if it was computed already."""
        self._failures = [0] * num_envs
        self._episodes = [_Episode() for _ in range(num_envs)]
        self._number_of_steps = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Name of each observation -> its shape, which all simulators share; empty before the first observation."""
        self._columns: list[dict[str, np.ndarray]] = [{} for _ in range(num_envs)]
        """By slot: name -> array [R, ...] in shared memory, for the observations that are written there."""
        self._row = 0
        """Row of the current observations in these arrays."""

    def share(self, columns: Sequence[ColumnAddress]) -> None:
        """Write large observations to shared memory from now on. `columns` has a column for each simulator.

        The current observations are written to row 0 when they are requested, the observations after each chunk to the next row, and the
        last observations of ended episodes to the `final_row` of that row. Outputs do not contain them. Raises InfrastructureError when
        the memory is gone.
        """
        self._columns, self._row = [column.map() for column in columns], 0
        self._slots.write_to(columns)

    def next_row(self) -> None:
        """Write the current observations to the next row of the shared memory too: they are the first ones of another rollout epoch."""
        self._row += 1
        for column in self._columns:
            for array in column.values():
                array[self._row] = array[self._row - 1]

    def end_sharing(self) -> None:
        """Stop writing to shared memory: outputs contain all observations again. The current ones are copied from it. Idempotent."""
        for episode, column in zip(self._episodes, self._columns, strict=True):
            for name, array in column.items():
                episode.obs.setdefault(name, array[self._row].copy())
        if self._columns[0]:
            self._columns = [{} for _ in self._episodes]
            self._slots.write_to([None] * self.num_envs)

    def reset(
        self, seed: int | Sequence[int] | np.ndarray | np.integer[Any] | None = None, *, record: int = 0
    ) -> EnvOutput:
        """Begin an episode in every simulator; return the first observations, no rewards, and dones that are false, [B, 1].

        `seed`: one number, from which a seed per simulator follows; a seed for each; or None for the next episodes by `seed_of`. The
        first `record` simulators keep images of the episode.
        """
        seeds_or_base = seed.tolist() if isinstance(seed, np.ndarray | np.generic) else seed
        if isinstance(seeds_or_base, int):
            self._seed, seeds_or_base = seeds_or_base, None
            self.restart_seeds()
        seeds = [
            self._next_seed(index) if seeds_or_base is None else int(seeds_or_base[index])
            for index in range(self.num_envs)
        ]
        requests = [
            SimulatorReset(seed=simulator_seed, record=index < record, row=self._row)
            for index, simulator_seed in enumerate(seeds)
        ]
        for index, outcome in enumerate(self._slots.exchange(requests)):
            answer = self._checked(index, outcome)
            if not isinstance(answer, SimulatorAnswer):
                answer = self._replaced(index, answer, again=requests[index])
            self._begin(index, answer)
        self._restarted.clear()
        return self.current()

    def restart_seeds(self) -> None:
        """Count episodes from 0 again, because `seed_of` returns other seeds from now on. Open episodes continue."""
        self._num_episodes, self._next_seeds = [0] * self.num_envs, [None] * self.num_envs

    def current(self) -> EnvOutput:
        """Return the current observations without rewards, as the first output of a trajectory."""
        all_false = np.zeros((self.num_envs, 1), bool)
        return EnvOutput(
            obs=self._observations(), terminations=all_false, truncations=all_false.copy(), dones=all_false.copy()
        )

    def step(self, actions: Any) -> EnvOutput:
        """Step each simulator with one action; `actions` is [B, ...]. The output has C = 1."""
        return self.chunk_step(np.asarray(actions)[:, None])

    def chunk_step(self, actions: Any) -> EnvOutput:
        """Step each simulator with a chunk of `actions` [B, C, ...], up to the end of its episode."""
        actions = np.asarray(actions)
        count, width = actions.shape[:2]
        if count != self.num_envs:
            raise ValueError(f"actions must have a row for each of {self.num_envs} simulators, got {count}")
        self._row += 1
        requests: list[Request | None] = [
            None
            if episode.resting
            else SimulatorChunk(actions=chunk, seed=self._peek_seed(index) if seed is None else seed, row=self._row)
            for index, (episode, chunk, seed) in enumerate(zip(self._episodes, actions, self._next_seeds, strict=True))
        ]
        outcomes = self._slots.exchange(requests)
        if not self._number_of_steps:
            self._refuse_if_none_works(outcomes)
        rewards: list[tuple[float, ...]] = [()] * count
        end_flags = np.zeros((2, count, width), bool)
        is_lost: np.ndarray | None = None
        intervene_actions: np.ndarray | None = None
        flags: np.ndarray | None = None
        final_info: list[dict[str, Any]] = []
        finals: dict[int, dict[str, np.ndarray]] = {}
        for index, (episode, outcome) in enumerate(zip(self._episodes, outcomes, strict=True)):
            if episode.resting is not None:
                end_flags[:, index, -1] = episode.resting
                for array in self._columns[index].values():
                    array[self._row] = array[self._row - 1]
            elif isinstance(outcome, SimulatorAnswer):
                self._failures[index] = 0
                rewards[index] = outcome.rewards
                if outcome.terminated or outcome.truncated:
                    column = -1 if self.auto_reset else len(outcome.rewards) - 1
                    end_flags[:, index, column] = outcome.terminated, outcome.truncated
                if outcome.intervene_flags is not None:
                    if intervene_actions is None or flags is None:
                        intervene_actions, flags = np.zeros_like(actions), np.zeros((count, width), bool)
                    intervene_actions[index], flags[index] = outcome.intervene_actions, outcome.intervene_flags
                if outcome.final_obs is not None:
                    finals[index] = self._moved(index, outcome.final_obs, final_row(self._row))
                if info := self._count(index, outcome):
                    final_info.append(info)
            else:
                is_lost = np.zeros(count, bool) if is_lost is None else is_lost
                is_lost[index], end_flags[1, index, -1] = True, True
                self._restarted.add(index)
                self._begin(index, self._replaced(index, outcome))
        if self._ends_together:
            self._require_common_end(end_flags[1].any(axis=1))
        obs = self._observations()
        sub_steps = [len(chunk_rewards) for chunk_rewards in rewards]
        self._number_of_steps += sum(sub_steps)
        return EnvOutput(
            obs=obs,
            final_obs=self._final_observations(obs, finals) if finals else None,
            rewards=np.array(
                [chunk_rewards + (0.0,) * (width - len(chunk_rewards)) for chunk_rewards in rewards], np.float32
            ),
            terminations=end_flags[0],
            truncations=end_flags[1],
            dones=end_flags[0] | end_flags[1],
            final_info=final_info or None,
            sub_steps=np.array(sub_steps, np.int64),
            lost=is_lost,
            intervene_actions=intervene_actions,
            intervene_flags=flags,
        )

    def _require_common_end(self, end_flags: np.ndarray) -> None:
        """Raise RolloutDataFailure when only some of the episodes that began together have ended, as `end_flags` [B] tells."""
        has_ended = [bool(end) for index, end in enumerate(end_flags) if index not in self._restarted]
        if any(has_ended) and not all(has_ended):
            raise RolloutDataFailure(
                f"episodes must be truncated together with env.options.ignoreTerminations and without autoReset, got {sum(has_ended)} of "
                f"{len(has_ended)}; give the simulators one time limit"
            )

    @property
    def all_resting(self) -> bool:
        """Whether every episode has ended and none begins before `reset`."""
        return all(episode.resting is not None for episode in self._episodes)

    @property
    def num_steps(self) -> int:
        """Number of steps of all simulators so far."""
        return self._number_of_steps

    def open_episodes(self) -> list[dict[str, Any]]:
        """Return the statistics so far of the episodes that have not ended, in the form of `final_info`."""
        return [self._info(index) for index, episode in enumerate(self._episodes) if episode.resting is None]

    def recordings(self) -> list[list[np.ndarray]]:
        """Return the images of the episodes that were recorded."""
        return [episode.frames for episode in self._episodes if episode.frames]

    def close(self) -> None:
        """End the simulators."""
        self._slots.close()

    def _count(self, index: int, answer: SimulatorAnswer) -> dict[str, Any] | None:
        """Add an answer to the open episode; return its `final_info` if it ended."""
        episode = self._episodes[index]
        episode.total += sum(answer.rewards)
        episode.length += len(answer.rewards)
        episode.success_once |= True in answer.successes
        episode.success_at_end = bool(answer.successes) and answer.successes[-1]
        episode.obs = answer.obs
        if answer.frames:
            episode.frames += answer.frames
        if not (answer.terminated or answer.truncated):
            return None
        info = self._info(index)
        if self.auto_reset:
            self._next_seed(index)
            self._begin(index, answer)
        else:
            episode.resting = (answer.terminated, answer.truncated)
        return info

    def _info(self, index: int) -> dict[str, Any]:
        episode = self._episodes[index]
        return {
            "slot": index,
            "return": episode.total,
            "length": episode.length,
            "success_once": episode.success_once,
            "success_at_end": episode.success_at_end,
        }

    def _begin(self, index: int, answer: SimulatorAnswer) -> None:
        self._episodes[index] = _Episode(obs=answer.obs, frames=list(answer.frames))

    def _refuse_if_none_works(self, outcomes: Sequence[Outcome | None]) -> None:
        """Raise RolloutDataFailure if there are several simulators and all of them failed in their first chunk of actions.

        Other seeds would not help, for example if the class has the interface of an older gymnasium.
        """
        failures = [outcome for outcome in outcomes if isinstance(outcome, RolloutDataFailure)]
        if len(failures) == len(outcomes) > 1:
            raise RolloutDataFailure(
                f"a simulator must make a chunk of actions, got a failure in the first one of all {len(failures)}: {failures[0]}; correct it"
            )

    def _checked(self, index: int, outcome: Outcome | None) -> Outcome | None:
        """Return the outcome of a reset, or a failure if its observations have other shapes than those of the other slots."""
        if not isinstance(outcome, SimulatorAnswer):
            return outcome
        shapes = {name: array.shape[1:] for name, array in self._columns[index].items()}
        shapes |= {name: array.shape for name, array in outcome.obs.items()}
        self._shapes = self._shapes or shapes
        if shapes == self._shapes:
            return outcome
        return RolloutDataFailure(
            f"all simulators must have observations of the same shapes {self._shapes}, got {shapes}; correct the simulator"
        )

    def _replaced(self, index: int, failure: Outcome | None, *, again: SimulatorReset | None = None) -> SimulatorAnswer:
        """Replace the simulator of a slot, and begin an episode; return the answer. Raises after MOST_FAILURES consecutive failures.

        The first attempt is the reset `again`, if there is one: simulators of a group begin with the same seed. Each further attempt uses
        another seed, because a seed with which the simulator hangs or dies must not end the run.
        """
        while True:
            self._failures[index] += 1
            logger.warning("the simulator of slot %s failed and is replaced: %s", index, failure)
            if self._failures[index] > MOST_FAILURES:
                raise RolloutDataFailure(
                    f"a simulator must make a chunk of actions, got {MOST_FAILURES} failures in a row in slot {index}, the last: {failure}; "
                    "correct it"
                )
            self._slots.replace(index)
            requests: list[Request | None] = [None] * self.num_envs
            requests[index] = again or SimulatorReset(seed=self._next_seed(index), row=self._row)
            again = None
            answer = self._slots.exchange(requests)[index]
            if isinstance(answer := self._checked(index, answer), SimulatorAnswer):
                return answer
            failure = answer

    def _observations(self) -> dict[str, np.ndarray]:
        if self._columns[0]:
            for index, episode in enumerate(self._episodes):
                episode.obs = self._moved(index, episode.obs, self._row)
        return {name: np.array([episode.obs[name] for episode in self._episodes]) for name in self._episodes[0].obs}

    def _moved(self, index: int, obs: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
        """Write those of `obs` that have a place in shared memory to `row` there, and return the others."""
        column = self._columns[index]
        for name in column.keys() & obs.keys():
            column[name][row] = obs[name]
        return {name: array for name, array in obs.items() if name not in column} if column else obs

    @staticmethod
    def _final_observations(
        obs: dict[str, np.ndarray], finals: dict[int, dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        filled = {name: array.copy() for name, array in obs.items()}
        for index, final in finals.items():
            for name, array in final.items():
                filled[name][index] = array
        return filled

    def _peek_seed(self, index: int) -> int:
        seed = self._next_seeds[index]
        if seed is None:
            seed = self._next_seeds[index] = self._seed_of(index, self._num_episodes[index])
        return seed

    def _next_seed(self, index: int) -> int:
        seed, self._next_seeds[index] = self._peek_seed(index), None
        self._num_episodes[index] += 1
        return seed

    def _derived_seed(self, index: int, episode: int) -> int:
        return int(np.random.SeedSequence([self._seed, index, episode]).generate_state(1)[0]) >> 1
