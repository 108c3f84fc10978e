"""One simulator with the interface of `gymnasium.Env`: its episodes, its chunks of actions, and the validation of what it returns.

It runs in a child process of the env worker (`SimulatorServer`), or in the worker itself (`vectorization: sync`). An episode that ends is
followed by a reset made here, so that the final observation is exact whatever version of gymnasium is installed.

Legend: C actions of a chunk.
"""

import logging
import math
import os
import socket
from typing import Any, NoReturn

import numpy as np

from rl_core.api.errors import ConfigError, RLJobError, RolloutDataFailure, text_of
from rl_core.api.user_code import describe, import_reference
from rl_core.envs.simulator_messages import (
    ANSWER,
    COLUMN,
    FAILURE,
    Request,
    answer_to_arrays,
    failure_to_arrays,
    request_from_arrays,
)
from rl_core.envs.video import Camera
from rl_core.messages.embodied import SimulatorAnswer, SimulatorChunk, SimulatorReset, SimulatorSettings
from rl_core.messages.envs import EnvFailure
from rl_core.transports.direct import Connection
from rl_core.transports.shared_rows import ColumnAddress, final_row

logger = logging.getLogger(__name__)
SUCCESS = ("success", "is_success")
"""Keys of the `info` of a step under which a simulator reports that the task is solved."""
META_WORLD = "Meta-World/"
"""Beginning of the ids of tasks of Meta-World."""
INTERVENTION = "intervene_action"
"""Key of the `info` of a step under which a simulator reports the action that a person took in place of the given one."""
NUMBERS = (float, int, np.number, np.ndarray)
"""Types that a reward may have."""
Observation = dict[str, Any]


def make_simulator(settings: SimulatorSettings) -> Any:
    """Return the environment of a gymnasium id, a task of Meta-World, or a `module:Class` of the user. Raises ConfigError when it cannot be built."""
    name = settings.id
    try:
        if ":" in name and not name.startswith("ALE/"):
            return import_reference(name, field="env.options.id")(**settings.kwargs)
        import gymnasium

        rendering = {"render_mode": "rgb_array"} if settings.record_every else {}
        if name.startswith(META_WORLD):
            from rl_core.envs.metaworld import MetaWorld

            return MetaWorld(name.removeprefix(META_WORLD), **rendering | settings.kwargs)
        return gymnasium.make(name, **rendering | settings.kwargs)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"env.options.id: {name} needs a package that is not installed: {error}; install rljob[env]"
        ) from error
    except Exception as error:  # gymnasium and user code may raise anything.
        raise ConfigError(f"env.options.id: {name} could not be built: {describe(error)}; correct it") from error


class Simulator:
    """Makes chunks of actions in one environment. Raises RolloutDataFailure for an answer that breaks the interface of gymnasium."""

    def __init__(self, settings: SimulatorSettings) -> None:
        """Build the environment. Raises ConfigError when it cannot be built."""
        self._env = make_simulator(settings)
        self._step = self._endless_step if settings.ignore_terminations else self._env.step
        self._label, self._auto_reset = settings.label, settings.auto_reset
        self.action_space = self._env.action_space
        self._discrete = type(self.action_space).__name__ == "Discrete"
        self._start = int(self.action_space.start) if self._discrete else 0
        self._shapes: dict[str, tuple[int, ...]] | None = None
        """Shapes of the first observation."""
        self._vector: tuple[int, ...] | None = None
        """Shape of the first observation if it was one vector of floating-point numbers, for which a shorter code path exists; else None."""
        self._column: Observation = {}
        """Arrays [R, ...] in shared memory for observations of these names."""
        self._camera = Camera(self._env, settings.record_every) if settings.record_every else None

    def write_to(self, column: Observation) -> None:
        """Write the observations with the names of `column` into its arrays [R, ...] from now on, at the rows of the requests."""
        self._column, self._vector = column, None

    def reset(self, request: SimulatorReset) -> SimulatorAnswer:
        """Begin an episode."""
        obs = self._begin(request)
        return SimulatorAnswer(obs=obs, frames=self._camera.begin(request.record) if self._camera else [])

    def chunk(self, request: SimulatorChunk) -> SimulatorAnswer:
        """Make the actions [C, ...] of a chunk up to the end of the episode. Under auto-reset an end begins the next episode."""
        actions = request.actions
        answer = SimulatorAnswer()
        interventions: dict[int, Any] = {}
        # Numbers of Python are faster than arrays here.
        for index, action in enumerate(actions.tolist() if actions.ndim == 1 else actions):
            result = self._step(self._action(action))
            if type(result) is not tuple or len(result) != 5:
                raise RolloutDataFailure(
                    f"{self._label}: step must return (observation, reward, terminated, truncated, info), got {type(result).__name__}"
                )
            raw, reward, terminated, truncated, info = result
            ends = bool(terminated or truncated)
            answer.obs = self._observation(raw, final_row(request.row) if ends and self._auto_reset else request.row)
            answer.rewards += (self._reward(reward),)
            answer.successes += (bool(info) and any(bool(info.get(name)) for name in SUCCESS),)
            if info and info.get(INTERVENTION) is not None:
                interventions[index] = self._taken(info[INTERVENTION], np.asarray(actions[index]))
            if self._camera:
                answer.frames += self._camera.after_step(last=ends)
            if ends:
                answer.terminated, answer.truncated = bool(terminated), bool(truncated)
                answer.final_obs = answer.obs
                if self._auto_reset:
                    answer.obs = self._begin(request)
                break
        if interventions:
            answer.intervene_actions = np.stack(
                [interventions.get(step, np.zeros_like(action)) for step, action in enumerate(actions)]
            )
            answer.intervene_flags = np.isin(np.arange(len(actions)), list(interventions))
        return answer

    def close(self) -> None:
        """Release what the environment holds."""
        self._env.close()

    def _endless_step(self, action: Any) -> Any:
        """Step without the report that the episode has terminated."""
        answer = self._env.step(action)
        if type(answer) is tuple and len(answer) == 5:
            return (*answer[:2], False, *answer[3:])
        return answer

    def _begin(self, request: Request) -> Observation:
        answer = self._env.reset(seed=request.seed)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise RolloutDataFailure(
                f"{self._label}: reset must return (observation, info), got {type(answer).__name__}"
            )
        return self._observation(answer[0], request.row)

    def _action(self, action: Any) -> Any:
        if self._discrete:
            return int(action) + self._start
        if hasattr(self.action_space, "low"):
            return np.clip(
                np.asarray(action, self.action_space.dtype), self.action_space.low, self.action_space.high
            ).reshape(self.action_space.shape)
        return action

    def _taken(self, action: Any, planned: np.ndarray) -> np.ndarray:
        """Return the action of a person in the form of the policy's, `planned`."""
        numbers = np.asarray(action) - (int(self.action_space.start) if self._discrete else 0)
        if numbers.size != planned.size:
            raise RolloutDataFailure(
                f"{self._label}: info[{INTERVENTION!r}] must have the {planned.size} numbers of an action, got {numbers.size}"
            )
        return numbers.reshape(planned.shape).astype(planned.dtype)

    def _reward(self, reward: Any) -> float:
        number = float(reward) if isinstance(reward, NUMBERS) else math.nan
        if not math.isfinite(number):
            raise RolloutDataFailure(f"{self._label}: a reward must be a finite number, got {reward!r}")
        return number

    def _observation(self, raw: Any, row: int) -> Observation:
        """Return an observation as named arrays: `states` for a vector, `pixels` for an image, or the names that it has itself.

        They are copies: simulators write the next observation into the same memory. Those with a place in shared memory are copied
        there, to `row`, and left out.
        """
        if type(raw) is np.ndarray and raw.shape == self._vector and raw.dtype.kind == "f":
            copied = raw.astype(np.float32) if raw.dtype == np.float64 else raw.copy()
            if math.isfinite(sum(copied.tolist())):
                return {"states": copied}
        if isinstance(raw, dict):
            arrays = {str(name): np.asarray(value) for name, value in raw.items()}
        else:
            array = np.asarray(raw)
            arrays = {"pixels" if array.ndim == 3 else "states": array}
        observation = {}
        for name, array in arrays.items():
            if array.dtype == np.float64:
                array = array.astype(np.float32)
            if array.dtype.kind not in "buif" or (array.dtype.kind == "f" and not np.isfinite(array).all()):
                raise RolloutDataFailure(
                    f"{self._label}: observation {name} must be finite numbers, got {array.dtype} {array.reshape(-1)[:4]}"
                )
            observation[name] = array
        shapes = {name: array.shape for name, array in observation.items()}
        expected = (self._shapes or shapes) | {name: array.shape[1:] for name, array in self._column.items()}
        if shapes != expected:
            raise RolloutDataFailure(f"{self._label}: observations must keep their shapes {expected}, got {shapes}")
        self._shapes = shapes
        for name, column in self._column.items():
            np.copyto(column[row], observation.pop(name), casting="safe")
        observation = {name: np.array(array) for name, array in observation.items()}
        states = observation.get("states")
        if len(observation) == 1 and states is not None and states.ndim == 1 and states.dtype.kind == "f":
            self._vector = states.shape
        return observation


class SimulatorServer:
    """Answers the requests of the env worker in a child process; see `child`."""

    max_turns = None

    def __init__(self, settings: SimulatorSettings) -> None:
        """Build the simulator. Raises ConfigError when it cannot be built."""
        self._simulator = Simulator(settings)

    def serve(self, stream: socket.socket) -> NoReturn:
        """Answer the requests on `stream`. If the simulator fails, the answer has the failure. Raises EOFError when the stream ends."""
        connection = Connection(stream, takes_descriptors=True)
        while True:
            for key, arrays in connection.receive(wait=True):
                if key == COLUMN:
                    self._simulator.write_to(_mapped(arrays, connection) if arrays else {})
                else:
                    connection.send(*self._answer(request_from_arrays(arrays)))

    def _answer(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Return key and arrays of an answer."""
        try:
            if isinstance(request, SimulatorReset):
                return ANSWER, answer_to_arrays(self._simulator.reset(request))
            return ANSWER, answer_to_arrays(self._simulator.chunk(request))
        except BaseException as error:  # noqa: BLE001 - a simulator raises anything, and its sys.exit() is a failure of it
            return FAILURE, failure_to_arrays(failure_of(error))


def _mapped(arrays: dict[str, np.ndarray], connection: Connection) -> Observation:
    """Map the column of shared memory whose address and file descriptor were received, and return its arrays."""
    descriptor = connection.descriptors.popleft()
    try:
        return ColumnAddress.unpack(arrays["address"]).map(descriptor)
    finally:
        os.close(descriptor)


def failure_of(error: BaseException) -> EnvFailure:
    """Return the failure that is sent for an error in a simulator. Errors of the simulator's own code are logged with their traceback."""
    if isinstance(error, RLJobError):
        return EnvFailure(type="RolloutDataFailure", message=text_of(error))
    logger.error("the simulator raised", exc_info=error)
    return EnvFailure(type="RolloutDataFailure", message=f"the simulator raised {describe(error)}; correct it")
