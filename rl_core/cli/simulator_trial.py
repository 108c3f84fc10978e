"""The child process of `check_simulator`: begins an episode in the simulator of a job and makes the actions that its policy chooses.

Started as `python -m rl_core.cli.simulator_trial` with the job's spec as JSON on standard input, and with the argument `policy` where
the folder of the policy can be read. It prints why the job cannot run as the last line of standard error and exits with 1.
"""

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_core.api.embodied import EmbodiedOptions, embodied_options
from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.job import RLJobSpec
from rl_core.api.user_code import describe, load_extensions, report_checked
from rl_core.envs.simulator import Simulator
from rl_core.messages.embodied import SimulatorChunk, SimulatorReset, SimulatorSettings
from rl_core.policies.actor_critic import ActorCritic
from rl_core.policies.folder import load_policy

ROWS = 2
"""Simulators that the policy acts for, so that one that takes a single observation is found."""
TOLERANCE = 1e-3
"""Largest difference between the log-probabilities of `predict` and of `forward_train`."""


@contextmanager
def _within(seconds: float, action: str, deadline: str) -> Iterator[None]:
    """Turn the errors of the block into ConfigErrors that name `action`, and raise one if the block takes longer than `seconds`."""

    def late(signum: int, frame: Any) -> None:
        raise ConfigError(
            f"env.options.id: the simulator must {action} within runtime.deadlines.{deadline} = {seconds:g} s, got no answer; "
            "raise it, or see why the simulator hangs"
        )

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except ConfigError:
        raise
    except RLJobError as error:
        raise ConfigError(f"env.options.id: {error}; correct it") from error
    except Exception as error:  # A simulator may raise anything.
        raise ConfigError(
            f"env.options.id: the simulator must {action}, it raised {describe(error)}; correct it"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def try_simulator(spec: RLJobSpec, *, with_policy: bool) -> None:
    """Build the simulator, begin an episode and make one chunk of actions. Call it on the main thread.

    The actions are zeros, or with `with_policy` those of the policy, which is checked too.

    Raises ConfigError naming the field of what does not work.
    """
    options, deadlines = embodied_options(spec), spec.runtime.deadlines
    settings = SimulatorSettings(id=options.id, kwargs=options.kwargs, auto_reset=True, label=f"simulator {options.id}")
    with _within(deadlines.env_reset, "be built", "envReset"):
        load_extensions(spec.extensions)
        simulator = Simulator(settings)
    with _within(deadlines.env_reset, "begin an episode", "envReset"):
        obs = simulator.reset(SimulatorReset(seed=1)).obs
    space = simulator.action_space
    zeros = np.zeros((options.chunk, *(space.shape or ())))
    actions = _actions_of_policy(spec, options, obs, space) if with_policy else zeros
    with _within(deadlines.env_step, "make a chunk of actions", "envStep"):
        simulator.chunk(SimulatorChunk(actions=actions, seed=2))
        simulator.close()


def _actions_of_policy(spec: RLJobSpec, options: EmbodiedOptions, obs: dict[str, np.ndarray], space: Any) -> np.ndarray:
    """Return the chunk of actions [C, ...] that the policy chooses for an observation. Raises ConfigError where it does not fit the simulator."""
    try:
        policy = load_policy(spec.model.path, seed=spec.algorithm.seed).eval()
    except ConfigError as error:
        raise ConfigError(f"model.path: {error}") from error
    _check_choice(policy, options.id, space)
    batch = {name: torch.from_numpy(np.stack([array] * ROWS)) for name, array in obs.items()}
    shapes = {name: list(tensor.shape) for name, tensor in batch.items()}
    try:
        with torch.no_grad():
            actions, result = policy.predict(dict(batch), "train")
            scored = policy.forward_train(result["forward_inputs"])
    except Exception as error:  # the policy may be the user's
        raise ConfigError(
            f"model.path: the policy must take the observations {shapes} of {options.id}, it raised {describe(error)}; "
            "correct its arguments in config.json, or its class"
        ) from error
    _check_actions(actions, options, space)
    if spec.algorithm.critic_in_use is not None and result.get("prev_values") is None:
        raise ConfigError(
            f"model.path: predict of the policy must return prev_values with algorithm.name {spec.algorithm.name}, got none; add a value head"
        )
    sampled, recomputed = result["prev_logprobs"].float(), scored["log_probs"].float()
    if sampled.shape != recomputed.shape or not torch.allclose(sampled, recomputed, atol=TOLERANCE, rtol=TOLERANCE):
        raise ConfigError(
            "model.path: forward_train of the policy must return the log-probabilities of predict for its forward_inputs, got "
            f"{_shown(recomputed)} for {_shown(sampled)}; correct one of them"
        )
    return np.asarray(actions[0])


def _check_choice(policy: nn.Module, name: str, space: Any) -> None:
    """Raise ConfigError unless the actions of a policy that is built in are of the kind that the simulator `name` takes."""
    if not isinstance(policy, ActorCritic):
        return
    if type(space).__name__ == "Discrete" and policy.num_actions != space.n:
        raise ConfigError(
            f"model.path: the policy must choose among the {space.n} actions of {name}, got num_actions {policy.num_actions}; "
            f"set num_actions to {space.n} in config.json"
        )
    if hasattr(space, "low") and policy.num_actions is not None:
        raise ConfigError(
            f"model.path: the policy must choose the {math.prod(space.shape)} numbers of an action of {name}, got num_actions "
            f"{policy.num_actions}; set action_dim to {math.prod(space.shape)} in config.json instead"
        )


def _check_actions(actions: Tensor, options: EmbodiedOptions, space: Any) -> None:
    """Raise ConfigError unless `actions` [ROWS, C, ...] are as many as a chunk has, and each has the size of an action."""
    if actions.shape[:2] != (ROWS, options.chunk):
        raise ConfigError(
            f"model.path: the policy must choose env.options.chunk = {options.chunk} actions at once, got actions {list(actions.shape)} for "
            f"{ROWS} observations; set chunk in config.json, or env.options.chunk"
        )
    size = 1 if type(space).__name__ == "Discrete" else math.prod(space.shape or (1,))
    if actions[0, 0].numel() != size:
        raise ConfigError(
            f"model.path: an action of {options.id} must have {size} numbers, got {actions[0, 0].numel()} from the policy; "
            "set action_dim in config.json"
        )


def _shown(log_probs: Tensor) -> str:
    return f"{[round(number, 4) for number in log_probs.flatten()[:3].tolist()]} {list(log_probs.shape)}"


def main(text: str, *, with_policy: bool) -> None:
    """Try the simulator of the spec given as JSON; exit with 1 and its problem when it cannot be used."""
    try:
        try_simulator(RLJobSpec.model_validate_json(text), with_policy=with_policy)
    except RLJobError as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main(sys.stdin.read(), with_policy="policy" in sys.argv[1:])
    report_checked()
