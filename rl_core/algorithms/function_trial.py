"""The child process of `user_functions.check_functions`: calls an estimator or a loss of the user on example rows.

Started as `python -m rl_core.algorithms.function_trial advantage|loss` with `spec.algorithm` as JSON on standard input. It prints why the
function cannot be used as the last line of standard error and exits with 1.
"""

import inspect
import sys
from collections import defaultdict

from rl_core.algorithms.registry import option_names, resolve
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import RLJobError
from rl_core.api.user_code import describe, report_checked

OPTIONS = {"advantage": ("reduce",), "loss": ("clip_low", "clip_high", "dual_clip")}
"""What the functions of each kind get besides their inputs, as far as they have a parameter for it."""


def require_call(kind: str, name: str) -> None:
    """Raise ValueError unless the function `name` can be called with inputs and those of the options that it has parameters for."""
    function = resolve(kind, name)
    accepted, _ = option_names(function)
    try:
        inspect.signature(function).bind(None, **{option: None for option in OPTIONS[kind] if option in accepted})
    except TypeError as error:
        arguments = f"inputs and, where it has a parameter for them, {', '.join(OPTIONS[kind])}"
        raise ValueError(
            f"must be a function of {arguments}, got {name!r}: {error}; give its other parameters a default"
        ) from error


def try_advantage(algorithm: AlgorithmSpec) -> None:
    """Call the estimator of `algorithm` on two groups of two rows of three tokens; one row is not valid, one group has equal rewards."""
    import torch

    from rl_core.algorithms.advantages.compute import compute_advantages
    from rl_core.algorithms.advantages.types import AdvantageInputs

    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    log_probs = torch.where(mask, torch.linspace(-2.0, -0.1, 12).reshape(4, 3), 0.0)
    per_token = algorithm.critic_in_use is not None
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5])
    inputs = AdvantageInputs(
        mask=mask,
        group_ids=torch.tensor([0, 0, 1, 1]),
        valid=torch.tensor([True, True, True, False]),
        rewards=rewards,
        token_rewards=mask * rewards[:, None] if per_token else None,
        reward_components=defaultdict(lambda: rewards),  # the names that the environment gives are not known here
        log_probs=log_probs,
        ref_log_probs=log_probs - 0.1 if algorithm.needs_reference else None,
        values=torch.zeros(4, 3) if per_token else None,
    )
    compute_advantages(algorithm.name, inputs)


def try_loss(algorithm: AlgorithmSpec) -> None:
    """Call the loss of `algorithm` on two rows of three tokens and take its gradient."""
    import torch

    from rl_core.algorithms.losses.compute import compute_policy_loss
    from rl_core.algorithms.losses.types import LossInputs

    loss = algorithm.loss
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    old_log_probs = torch.where(mask, torch.linspace(-2.0, -0.1, 6).reshape(2, 3), 0.0)
    accepted, _ = option_names(resolve("loss", loss.name))
    clip_low, clip_high = loss.clip
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": loss.dual_clip}
    inputs = LossInputs(
        log_probs=(old_log_probs + 0.1).requires_grad_(),
        advantages=torch.tensor([[1.0], [-0.5]]) * mask,
        mask=mask,
        old_log_probs=old_log_probs,
        behavior_versions=torch.zeros(2, 3, dtype=torch.int64),
        current_version=1,
        max_tokens=3,
        aggregation=algorithm.aggregation,
    )
    accepted_options = {name: value for name, value in options.items() if name in accepted}
    compute_policy_loss(loss.name, inputs, **accepted_options).loss.backward()


def main(kind: str, text: str) -> None:
    """Try the function of `kind` of `spec.algorithm` given as JSON; exit with 1 and its problem when it cannot be used."""
    algorithm = AlgorithmSpec.model_validate_json(text)
    name = algorithm.name if kind == "advantage" else algorithm.loss.name
    try:
        require_call(kind, name)
        (try_advantage if kind == "advantage" else try_loss)(algorithm)
    except (RLJobError, ValueError) as error:
        sys.exit(" ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 - the gradient of user code may raise anything
        sys.exit(f"{kind} {name!r} must not fail, it raised {describe(error)}; correct it")


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin.read())
    report_checked()
