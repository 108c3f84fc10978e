"""The messages between an env worker and the child process of one simulator, as arrays by name.

    reset      seed, record             answer: obs.*, frames.*
    chunk      seed, actions            answer: obs.*, final_obs.*, frames.*, rewards, ends, intervene_*; or failure, a text
    column     address, a descriptor    no answer: observations go to shared memory from now on; without address no more

`seed` is followed by the row of the observation in shared memory. `ends` are terminated and truncated, then whether each step succeeded.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_core.messages.embodied import SimulatorAnswer, SimulatorChunk, SimulatorReset
from rl_core.messages.envs import EnvFailure

REQUEST, COLUMN, ANSWER, FAILURE = "request", "column", "answer", "failure"
"""Keys of the messages."""
Request = SimulatorReset | SimulatorChunk
Arrays = Mapping[str, np.ndarray]


def request_to_arrays(request: Request) -> dict[str, Any]:
    """Convert a request to the simulator process into arrays by name, the form in which it is sent."""
    seed = np.array((request.seed, request.row), np.int64)
    if isinstance(request, SimulatorReset):
        return {"seed": seed, "record": np.array(request.record)}
    return {"seed": seed, "actions": request.actions}


def request_from_arrays(arrays: Arrays) -> Request:
    """Convert received `arrays` back into a request. The inverse of `request_to_arrays`."""
    seed, row = arrays["seed"].tolist()
    if "actions" in arrays:
        return SimulatorChunk(actions=arrays["actions"], seed=seed, row=row)
    return SimulatorReset(seed=seed, record=bool(arrays["record"]), row=row)


def answer_to_arrays(answer: SimulatorAnswer) -> dict[str, Any]:
    """Convert the answer of a simulator process into arrays by name, the form in which it is sent."""
    arrays = {f"obs.{name}": array for name, array in answer.obs.items()}
    if answer.final_obs is not None:
        arrays |= {f"final_obs.{name}": array for name, array in answer.final_obs.items()}
    arrays |= {f"frames.{index}": frame for index, frame in enumerate(answer.frames)}
    if answer.intervene_flags is not None:
        arrays |= {"intervene_actions": answer.intervene_actions, "intervene_flags": answer.intervene_flags}
    if answer.rewards:
        arrays["rewards"] = np.array(answer.rewards)
        arrays["ends"] = np.array([answer.terminated, answer.truncated, *answer.successes])
    return arrays


def answer_from_arrays(arrays: Arrays) -> SimulatorAnswer:
    """Return the answer that `answer_to_arrays` converted to `arrays`."""
    parts: dict[str, dict[str, np.ndarray]] = {"obs": {}, "final_obs": {}, "frames": {}}
    for name, array in arrays.items():
        part, dot, field = name.partition(".")
        if dot:
            parts[part][field] = array
    if "rewards" not in arrays:
        return SimulatorAnswer(obs=parts["obs"], frames=list(parts["frames"].values()))
    terminated, truncated, *successes = arrays["ends"].tolist()
    return SimulatorAnswer(
        obs=parts["obs"],
        final_obs=parts["final_obs"] or None,
        rewards=tuple(arrays["rewards"].tolist()),
        terminated=terminated,
        truncated=truncated,
        successes=tuple(successes),
        intervene_actions=arrays.get("intervene_actions"),
        intervene_flags=arrays.get("intervene_flags"),
        frames=list(parts["frames"].values()),
    )


def failure_to_arrays(failure: EnvFailure) -> dict[str, Any]:
    """Return the message of a failure as an array of its bytes."""
    return {"text": np.frombuffer(failure.message.encode(), np.uint8)}


def failure_from_arrays(arrays: Arrays) -> str:
    """Return the message of a failure."""
    return arrays["text"].tobytes().decode()
