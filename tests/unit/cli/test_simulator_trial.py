"""`rljob validate` makes some steps in a job's simulator with its policy, and names the field of what does not fit."""

import json
import signal

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.cli.simulator_trial import try_simulator
from rl_core.cli.validate import check_simulator
from rl_core.policies.mlp import MLPPolicy

SIMULATOR = "tests.unit.embodied.simulators:Echo"


class Forgetful(MLPPolicy):
    """Its trainer sees other log-probabilities than its rollout."""

    def forward_train(self, inputs):
        scores = super().forward_train(inputs)
        return scores | {"log_probs": scores["log_probs"] - 1}


class Valueless(MLPPolicy):
    """Has no value."""

    def predict(self, obs, mode="train"):
        actions, result = super().predict(obs, mode)
        return actions, result | {"prev_values": None}


def make_job(folder, *, policy="mlp", deadlines=None, chunk=1, arguments=None, **options):
    """Return the spec of a job with a policy that is written into `folder`."""
    arguments = {"observation_size": 2, "action_dim": 1, "hidden": [4], "chunk": chunk} | (arguments or {})
    (folder / "config.json").write_text(json.dumps({"policy": policy, "arguments": arguments}))
    return RLJobSpec.model_validate(
        {
            "program": "embodied",
            "model": {"path": str(folder)},
            "data": {"train": "none"},
            "algorithm": {"name": "gae", "critic": {}},
            "env": {
                "type": "gymnasium",
                "options": {"id": SIMULATOR, "numEnvs": 2, "horizon": 4, "chunk": chunk, **options},
            },
            "runtime": {"deadlines": deadlines or {}},
        }
    )


@pytest.mark.parametrize("with_policy", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk": 2},
        {"id": "CartPole-v1", "arguments": {"observation_size": 4, "num_actions": 2, "action_dim": None}},
        {"id": "Pendulum-v1", "arguments": {"observation_size": 3}},
    ],
)
def test_a_simulator_that_fits_its_policy_has_no_problem(tmp_path, options, with_policy):
    try_simulator(make_job(tmp_path, **options), with_policy=with_policy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "CartPole-v9"}, ["env.options.id: CartPole-v9 could not be built", "v1"]),
        ({"id": "tests.unit.embodied.simulators:Eco"}, ["env.options.id", "Eco", "Echo"]),
        ({"id": "ALE/Pong-v5"}, ["env.options.id: ALE/Pong-v5 could not be built"]),
        ({"kwargs": {"length": 3}}, ["could not be built", "unexpected keyword argument 'length'"]),
        ({"kwargs": {"faults": ["raise"] * 2, "fault_at": 1}}, ["make a chunk of actions", "RuntimeError: broken"]),
        ({"kwargs": {"faults": ["nan"] * 2, "fault_at": 1}}, ["a reward must be a finite number, got nan"]),
        ({"arguments": {"observation_size": 3}}, ["model.path", "{'states': [2, 2]}", "RuntimeError"]),
        ({"arguments": {"action_dim": 2}}, ["must have 1 numbers, got 2", "set action_dim"]),
        (
            {"arguments": {"action_dim": None, "num_actions": 4}},
            ["got num_actions 4", "set action_dim to 1 in config.json instead"],
        ),
        (
            {"id": "CartPole-v1", "arguments": {"observation_size": 4, "action_dim": None, "num_actions": 3}},
            ["choose among the 2 actions of CartPole-v1, got num_actions 3", "set num_actions to 2"],
        ),
        ({"arguments": {"chunk": 3}}, ["env.options.chunk = 1 actions at once, got actions [2, 3, 1]"]),
        ({"policy": f"{__name__}:Forgetful"}, ["must return the log-probabilities of predict"]),
        ({"policy": f"{__name__}:Valueless"}, ["must return prev_values", "got none; add a value head"]),
        ({"policy": "mlpp"}, ["model.path: policy in ", "config.json", "got 'mlpp'"]),
        (
            {"kwargs": {"faults": ["hang in reset"] * 2}, "deadlines": {"envReset": 0.2}},
            ["begin an episode within runtime.deadlines.envReset = 0.2 s, got no answer"],
        ),
        (
            {"kwargs": {"faults": ["hang"] * 2, "fault_at": 1}, "deadlines": {"envStep": 0.2}},
            ["make a chunk of actions within runtime.deadlines.envStep = 0.2 s"],
        ),
    ],
)
def test_what_does_not_work_is_named_with_its_field(tmp_path, options, words):
    spec = make_job(tmp_path, **options)
    with pytest.raises(ConfigError) as raised:
        try_simulator(spec, with_policy=True)
    assert all(word in str(raised.value) for word in words), raised.value
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_simulator_that_ends_its_process_is_a_problem(tmp_path):
    spec = make_job(tmp_path, kwargs={"faults": ["exit"] * 2, "fault_at": 1})
    (problem,) = check_simulator(spec, search_path="", with_policy=False)
    rule = "spec.env.options.id: must not end its process"
    assert problem.startswith(f"{rule}, got the simulator {SIMULATOR}, which ended it with code ")
