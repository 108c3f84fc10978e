"""Fields of a job that mean nothing to a policy that acts in simulators are refused by their names."""

import pytest

from rl_core.api.embodied import OF_TEXT, embodied_options, fields_of_text
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec

BASE = {
    "program": "embodied",
    "model": {"path": "policy"},
    "data": {"train": "none"},
    "algorithm": {"name": "gae", "critic": {}},
    "env": {"type": "gymnasium", "options": {"id": "CartPole-v1"}},
}
GIVEN = {
    "model.lora": {"rank": 8},
    "model.float32Head": True,
    "model.dtype": "bfloat16",
    "data.validation": "held_out.jsonl",
    "data.systemPrompt": "Walk.",
    "algorithm.recomputeLogProbs": True,
    "algorithm.rewardScale": {"sourceMin": 0.0, "sourceMax": 500.0, "targetMin": 0.0, "targetMax": 1.0},
    "algorithm.rewardKlCoefficient": 0.1,
    "algorithm.loss": {"klCoefficient": 0.1},
    "algorithm.dynamicSampling": {"enabled": True},
    "algorithm.critic": {"separate": True},
    "actor.attention": "eager",
    "actor.compile": True,
    "actor.gradientCheckpointing": True,
    "rollout.engine": "sglang",
    "rollout.sampling": {"temperature": 0.5},
    "rollout.maxBatch": 4,
    "env.maxTurns": 3,
    "validation.temperature": 0.5,
    "samples": {"groups": 1},
}


def job(**fields):
    spec = {name: dict(value) if isinstance(value, dict) else value for name, value in BASE.items()}
    for path, value in fields.items():
        section, _, name = path.partition(".")
        spec[section] = {**spec.get(section, {}), name: value} if name else value
    return RLJobSpec.model_validate(spec)


def test_a_job_without_them_is_taken():
    assert embodied_options(job()).id == "CartPole-v1"


@pytest.mark.parametrize("path", GIVEN)
def test_a_field_of_text_is_refused_by_its_name(path):
    with pytest.raises(ConfigError, match=rf"^{path}(\.\w+)* must be left out with program embodied: .*; remove it$"):
        embodied_options(job(**{path: GIVEN[path]}))


def test_all_that_are_given_are_named():
    spec = job(**{"rollout.maxBatch": 4, "actor.compile": True})
    assert fields_of_text(spec) == ["actor.compile", "rollout.maxBatch"]


@pytest.mark.parametrize("loss", ["decoupled_ppo"])
def test_a_loss_that_needs_other_log_probabilities_is_refused(loss):
    with pytest.raises(ConfigError, match=f"algorithm.loss.name must not be {loss} with program embodied"):
        embodied_options(job(**{"algorithm.loss": {"name": loss}}))


def test_megatron_trains_no_policy_that_acts():
    with pytest.raises(ConfigError, match="actor.backend must be fsdp1 or fsdp2 with program embodied, got megatron"):
        embodied_options(job(**{"actor.backend": "megatron"}))


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ([5, 1], r"\.rewardFilter must be \[low, high\] with low <= high, got \[5, 1\]; exchange them"),
        ([True, 2], r"\.rewardFilter\.0: .*valid number, got True; correct it"),
        ([0, False], r"\.rewardFilter\.1: .*valid number, got False; correct it"),
        ([0.5], r"\.rewardFilter\.1: .*required"),
        (True, r"\.rewardFilter: .*valid tuple, got True; correct it"),
        (5, r"\.rewardFilter: .*valid tuple, got 5; correct it"),
    ],
)
def test_bounds_of_the_reward_filter_are_two_numbers_the_lower_one_first(bounds, why):
    with pytest.raises(ConfigError, match=rf"^env\.options{why}"):
        embodied_options(filtering(bounds))


def filtering(bounds, auto_reset=False):
    return job(**{"env.options": {"id": "CartPole-v1", "rewardFilter": bounds, "autoReset": auto_reset}})


def test_rewards_with_values_in_them_are_not_filtered():
    assert embodied_options(filtering([1, 1])).reward_filter == (1.0, 1.0)
    assert embodied_options(filtering(None, auto_reset=True)).reward_filter is None
    with pytest.raises(
        ConfigError, match=r"autoReset must be false with .*rewardFilter, .* got true and \[1, 2.5\]; set"
    ):
        embodied_options(filtering([1, 2.5], auto_reset=True))


def test_every_field_is_one_of_the_schema():
    for path in OF_TEXT:
        holder = RLJobSpec
        for name in path.split("."):
            assert name in holder.model_fields, path
            kinds = [
                holder.model_fields[name].annotation,
                *getattr(holder.model_fields[name].annotation, "__args__", ()),
            ]
            holder = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
