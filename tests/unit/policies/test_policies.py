"""The policies that are built in: the trainer scores an action as the rollout that chose it did, and gradients are those of the density."""

import json

import pytest
import torch

from rl_core.api.errors import ConfigError
from rl_core.policies.base import splits_values
from rl_core.policies.cnn import CNNPolicy
from rl_core.policies.folder import build_policy
from rl_core.policies.mlp import MLPPolicy

ROWS, SIDE = 5, 16
VLA = {
    "model_type": "llava",
    "image_token_index": 1,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 8,
        "vision_use_head": False,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 40,
        "max_position_embeddings": 64,
    },
}
IMAGE = {"image": [SIDE, SIDE, 3], "channels": [4], "hidden": 8}
CASES = {
    "mlp discrete": ("mlp", {"observation_size": 6, "num_actions": 3, "chunk": 2, "hidden": [8]}),
    "mlp normal": ("mlp", {"observation_size": 6, "action_dim": 2, "chunk": 3, "hidden": [8]}),
    "cnn discrete": ("cnn", IMAGE | {"num_actions": 4}),
    "cnn normal": ("cnn", IMAGE | {"action_dim": 2, "chunk": 2}),
    "mlp at a temperature": ("mlp", {"observation_size": 6, "num_actions": 3, "hidden": [8], "temperature_train": 0.3}),
    "vla": ("vla", {"model": VLA, "action_dim": 2, "chunk": 2, "bins": 8, "state_size": 6, "temperature_train": 0.7}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def policy(request):
    name, arguments = request.param
    return build_policy(json.dumps({"policy": name, "arguments": arguments}), seed=1).double().eval()


@pytest.fixture
def obs():
    torch.manual_seed(0)
    return {
        "states": torch.randn(ROWS, 6, dtype=torch.float64),
        "pixels": torch.randint(256, (ROWS, SIDE, SIDE, 3), dtype=torch.uint8),
        "instruction": torch.randint(2, 30, (ROWS, 3)),
    }


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_trainer_scores_a_decision_as_the_rollout_did(policy, obs, mode):
    with torch.no_grad():
        actions, result = policy.predict(obs, mode)
    scores = policy.forward_train(result["forward_inputs"])
    assert torch.allclose(scores["log_probs"], result["prev_logprobs"], atol=1e-10)
    assert torch.allclose(scores["values"], result["prev_values"], atol=1e-10)
    assert scores["log_probs"].shape == scores["entropy"].shape == result["prev_logprobs"].shape
    assert scores["log_probs"].shape[:2] == actions.shape[:2] == (ROWS, policy.chunk)
    assert scores["values"].shape == (ROWS, 1)
    assert all(len(tensor) == ROWS for tensor in result["forward_inputs"].values())


def test_a_row_does_not_depend_on_the_others_and_eval_takes_the_likeliest_action(policy, obs):
    together, _ = policy.predict(obs, "eval")
    alone, result = policy.predict({name: tensor[2:3] for name, tensor in obs.items()}, "eval")
    assert torch.allclose(together[2:3], alone)
    sampled = [policy.predict({name: tensor[2:3] for name, tensor in obs.items()})[0] for _ in range(20)]
    assert any(not torch.equal(alone, other) for other in sampled)
    if policy.forward_train(result["forward_inputs"])["log_probs"].numel() == 1:
        best = result["prev_logprobs"].item()
        scores = [policy.predict({n: t[2:3] for n, t in obs.items()})[1]["prev_logprobs"].item() for _ in range(20)]
        assert best >= max(scores)


def test_gradients_are_those_of_finite_differences(policy, obs):
    """Over a random combination of all outputs, along a random direction of all parameters, in float64."""
    with torch.no_grad():
        _, result = policy.predict(obs)
    weights = {
        name: torch.randn_like(tensor) for name, tensor in policy.forward_train(result["forward_inputs"]).items()
    }

    def value():
        outputs = policy.forward_train(result["forward_inputs"])
        return sum((outputs[name] * weights[name]).sum() for name in weights)

    parameters = [p for p in policy.parameters() if p.requires_grad]
    directions = [torch.randn_like(p) for p in parameters]
    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    expected = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None).item()

    def shifted(size):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=size)
            moved = value().item()
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(direction, alpha=size)
        return moved

    exact = not hasattr(policy, "vlm")  # the norms and rotary embeddings of transformers compute in float32
    step, tolerance = (1e-6, 1e-5) if exact else (1e-3, 1e-2)
    assert (shifted(step) - shifted(-step)) / (2 * step) == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_the_sampled_actions_have_the_distribution_that_is_scored(policy, obs):
    """The mean of minus the log-probability of samples is the entropy of the first number of an action."""
    many = {name: tensor[:1].expand(4000, *tensor.shape[1:]) for name, tensor in obs.items()}
    with torch.no_grad():
        _, result = policy.predict(many)
        entropy = policy.forward_train(result["forward_inputs"])["entropy"][0, 0, 0].item()
    surprise = -result["prev_logprobs"][:, 0, 0]
    assert surprise.mean().item() == pytest.approx(entropy, abs=5 * surprise.std().item() / 4000**0.5 + 1e-3)


def test_tokens_are_the_last_ids_of_the_vocabulary_and_stand_for_equal_parts():
    name, arguments = CASES["vla"]
    policy = build_policy(json.dumps({"policy": name, "arguments": arguments}))
    assert policy.first_action == 32
    tokens = torch.arange(8)
    assert torch.equal(policy._embed(tokens), policy.vlm.get_input_embeddings().weight[32:])
    obs = {"pixels": torch.zeros(64, SIDE, SIDE, 3, dtype=torch.uint8), "states": torch.zeros(64, 6)}
    actions, result = policy.predict(obs)
    centers = torch.linspace(-1 + 1 / 8, 1 - 1 / 8, 8)
    assert torch.allclose(actions.flatten(1), centers[result["forward_inputs"]["tokens"]])
    with pytest.raises(Exception, match=r"bins must be in \[2, 40\]"):
        build_policy(json.dumps({"policy": name, "arguments": arguments | {"bins": 41}}))


@pytest.mark.parametrize("case", ["mlp discrete", "cnn discrete", "vla"])
def test_logits_are_divided_by_the_temperature_of_training_and_in_evaluations_by_their_own(case, obs):
    """Shares of 4,000 first actions beside the distributions of the same weights at temperature 1."""
    name, arguments = CASES[case]
    policies = {
        train: build_policy(
            json.dumps(
                {"policy": name, "arguments": arguments | {"temperature_train": train, "temperature_eval": 2.0}}
            ),
            seed=1,
        ).double()
        for train in (1.0, 0.5)
    }
    choices = 8 if name == "vla" else arguments["num_actions"]
    kept = policies[1.0].predict({key: tensor[:1].expand(choices, *tensor.shape[1:]) for key, tensor in obs.items()})[1]
    inputs = dict(kept["forward_inputs"])
    chosen = "tokens" if name == "vla" else "actions"
    inputs[chosen] = inputs[chosen].clone()
    inputs[chosen][:, 0] = torch.arange(choices)
    with torch.no_grad():
        plain, sharp = (
            policies[train].forward_train(inputs)["log_probs"].reshape(choices, -1)[:, 0] for train in (1.0, 0.5)
        )
        assert torch.allclose(sharp, torch.log_softmax(plain / 0.5, dim=0))
        many = {key: tensor[:1].expand(4000, *tensor.shape[1:]) for key, tensor in obs.items()}
        torch.manual_seed(0)
        drawn = policies[0.5].predict(many, "eval")[1]["forward_inputs"][chosen].flatten(1)[:, 0]
    shares = torch.bincount(drawn, minlength=choices) / 4000
    assert shares.tolist() == pytest.approx(torch.softmax(plain / 2.0, dim=0).tolist(), abs=0.04)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_actions": 2, "temperature_train": 0.0}, "temperature_train must be above 0"),
        ({"num_actions": 2, "temperature_eval": -1.0}, "temperature_eval at least 0"),
        ({"action_dim": 2, "temperature_eval": 0.5}, "left out with action_dim.*initial_log_std"),
    ],
)
def test_temperatures_that_mean_nothing_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        build_policy(json.dumps({"policy": "mlp", "arguments": {"observation_size": 3} | arguments}))


@pytest.mark.parametrize("case", ["mlp discrete", "mlp normal"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_act_and_values_are_bit_equal_to_predict(case, mode):
    name, arguments = CASES[case]
    policy = build_policy(json.dumps({"policy": name, "arguments": arguments | {"normalize": True}}).encode(), seed=0)
    obs = {"states": torch.randn(ROWS, 6)}
    policy.update_statistics({"states": torch.randn(20, 6) * 3 + 1}, None)
    torch.manual_seed(1)
    actions, whole = policy.predict(obs, mode)
    torch.manual_seed(1)
    chosen, part = policy.act(obs, mode)
    assert torch.equal(chosen, actions) and torch.equal(part["prev_logprobs"], whole["prev_logprobs"])
    assert part["forward_inputs"].keys() == whole["forward_inputs"].keys() and "prev_values" not in part
    assert torch.equal(policy.values(obs), whole["prev_values"])


def test_values_are_split_off_only_where_no_subclass_changes_what_they_are_made_of():
    class Named(MLPPolicy):
        pass

    class OtherPredict(MLPPolicy):
        def predict(self, obs, mode="train"):
            return super().predict(obs, "eval")

    class OtherNetworks(MLPPolicy):
        def networks(self, observed):
            return super().networks(2 * observed)

    made = {kind: kind(observation_size=2, num_actions=2) for kind in (MLPPolicy, Named, OtherPredict, OtherNetworks)}
    assert [splits_values(policy) for policy in made.values()] == [True, True, False, False]
    assert not splits_values(CNNPolicy(**IMAGE, num_actions=2))
