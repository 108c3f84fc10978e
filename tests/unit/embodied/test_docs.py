"""The simulator and the policy in docs/embodied.md work as printed, and stay short."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.policies.folder import build_policy

DOC = Path(__file__).parents[3] / "docs" / "embodied.md"
EXAMPLES = Path(__file__).parents[3] / "examples" / "embodied"


@pytest.fixture
def blocks(monkeypatch):
    found = re.findall(r"```(?:python|json)\n(.*?)```", DOC.read_text(), re.DOTALL)
    for name, code in (("walk", found[0]), ("two_way", found[2])):
        module = ModuleType(name)
        exec(code, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_the_policy_of_the_docs_acts_in_the_simulator_of_the_docs_and_scores_its_actions_again(blocks):
    simulator, config, policy_code = blocks[:3]
    assert max(len(simulator.splitlines()), len(policy_code.splitlines())) < 30
    policy = build_policy(config)
    env = GymnasiumVectorEnv("walk:Walk", 3, length=5)
    obs, ends = env.reset(seed=1).obs, []
    for _ in range(12):
        states = {name: torch.as_tensor(array) for name, array in obs.items()}
        with torch.no_grad():
            actions, result = policy.predict(states)
        scores = policy.forward_train(result["forward_inputs"])
        assert torch.equal(scores["log_probs"], result["prev_logprobs"])
        assert result["prev_logprobs"].shape == (3, 1, 1) and result["prev_values"].shape == (3, 1)
        output = env.chunk_step(actions.numpy())
        obs, ends = output.obs, ends + (output.final_info or [])
    env.close()
    assert ends and all(1 <= end["length"] <= 5 for end in ends)
    assert policy.predict(states, "eval")[0].unique().tolist() in ([0.0], [1.0], [0.0, 1.0])


def test_the_example_for_clusters_trains_as_the_local_one():
    local = yaml.safe_load((EXAMPLES / "cartpole.yaml").read_text())["spec"]
    _, policy, job = yaml.safe_load_all((EXAMPLES / "rljob.yaml").read_text())
    there = job["spec"]
    assert there["algorithm"] == local["algorithm"] and there["env"]["options"] == local["env"]["options"]
    assert all(there["actor"][name] == local["actor"][name] for name in ("gradClip", "optimizer"))
    config = json.loads((EXAMPLES / local["model"]["path"] / "config.json").read_text())
    assert json.loads(policy["data"]["config.json"]) == config
