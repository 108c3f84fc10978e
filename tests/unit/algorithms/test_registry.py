"""Names resolve to functions; mistakes say what is known."""

import inspect

import pytest
import torch

from rl_core.algorithms import registry as registry_module
from rl_core.algorithms.advantages import AdvantageInputs, AdvantageResult, compute_advantages
from rl_core.algorithms.advantages.compute import SELF_WHITENING
from rl_core.algorithms.losses.importance import DEFAULT_BOUNDS
from rl_core.algorithms.registry import names, register, resolve
from rl_core.algorithms.stats import Stat
from rl_core.api.algorithm import ADVANTAGE_ALIASES, ADVANTAGES, AlgorithmSpec
from rl_core.api.algorithm import SELF_WHITENING as BY_NAME
from rl_core.api.loss import IMPORTANCE_BOUNDS, LOSSES, LossSpec

MASK = torch.ones(1, 2, dtype=torch.bool)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    for attribute in ("_known", "_aliases"):
        copy = {kind: dict(found) for kind, found in getattr(registry_module, attribute).items()}
        monkeypatch.setattr(registry_module, attribute, copy)


@pytest.mark.parametrize("kind", ["advantage", "loss", "reward"])
def test_every_built_in_resolves_to_a_function(kind):
    assert names(kind)
    assert list(names(kind)) == sorted(names(kind))
    assert all(callable(resolve(kind, name)) for name in names(kind))


def test_schema_offers_only_names_the_registry_knows():
    assert set(ADVANTAGES) <= set(names("advantage"))
    assert set(LOSSES) <= set(names("loss"))
    for alias, name in ADVANTAGE_ALIASES.items():
        assert resolve("advantage", alias) is resolve("advantage", name)
        assert AlgorithmSpec.model_validate({"name": alias}).name == name


def test_schema_judges_importance_bounds_by_the_defaults_of_the_function():
    assert IMPORTANCE_BOUNDS == DEFAULT_BOUNDS


def test_schema_knows_which_estimators_whiten_by_themselves():
    """By name and not by how it begins: a module of the user may begin alike."""
    assert {resolve("advantage", name) for name in BY_NAME} == SELF_WHITENING
    assert AlgorithmSpec.model_validate({"name": "reinforce_plus_plus_mine:f", "whiten": True}).whiten


@pytest.mark.parametrize("name", LOSSES)
def test_the_clip_of_a_job_that_writes_none_is_the_loss_functions(name):
    parameters = inspect.signature(resolve("loss", name)).parameters
    defaults = [parameters[side].default for side in ("clip_low", "clip_high") if side in parameters]
    assert defaults in ([], list(LossSpec(name=name).clip))


@pytest.mark.parametrize(
    ("kind", "alias", "name"),
    [
        ("advantage", "reinforce++", "reinforce_plus_plus"),
        ("advantage", "REINPP", "reinforce_plus_plus"),
        ("advantage", "ppo", "gae"),
        ("advantage", "Dr-GRPO", "dr_grpo"),
        ("loss", "actor", "ppo_clip"),
        ("loss", "actor-critic", "ppo_clip"),
        ("loss", "decoupled_actor_critic", "decoupled_ppo"),
        ("loss", "opd", "reinforce"),
    ],
)
def test_aliases_and_spellings_lead_to_one_function(kind, alias, name):
    assert resolve(kind, alias) is resolve(kind, name)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"cispo, decoupled_ppo, gspo, opd, ppo_clip, reinforce.*'nope'"):
        resolve("loss", "nope")
    for call in (lambda: resolve("color", "red"), lambda: names("color"), lambda: register("color", "red")):
        with pytest.raises(ValueError, match="advantage, loss, reward"):
            call()


def test_the_metrics_of_a_registered_estimator_are_kept_beside_the_shared_ones():
    @register("advantage", "telling")
    def telling(inputs):
        told = {"advantages/std": Stat("sum", 1.0, 1), "advantages/max": Stat("max", 9.0, 1)}
        return AdvantageResult(inputs.mask.float(), metrics=told)

    metrics = compute_advantages("telling", AdvantageInputs(mask=MASK)).metrics
    assert float(metrics["advantages/std"]) == 1.0
    assert float(metrics["advantages/max"]) == 1.0  # of what trains, whatever was told


def test_registered_function_is_called_under_its_name_and_aliases():
    @register("advantage", "Half-Reward", aliases=("half",))
    def half(inputs, *, factor=0.5):
        return AdvantageResult(inputs.mask * inputs.rewards.unsqueeze(1) * factor)

    assert resolve("advantage", "half_reward") is resolve("advantage", "half") is half
    assert "half_reward" in names("advantage") and "half" not in names("advantage")
    inputs = AdvantageInputs(mask=MASK, rewards=MASK.float().sum(1))
    assert compute_advantages("half", inputs, factor=2.0).advantages.tolist() == [[4.0, 4.0]]
    with pytest.raises(ValueError, match="got volume"):
        compute_advantages("half", inputs, volume=11)


def test_a_function_that_takes_the_name_of_a_whitening_estimator_is_whitened_when_asked():
    @register("advantage", "gdpo", overwrite=True)
    def mine(inputs):
        return AdvantageResult(inputs.mask.float() * torch.tensor([1.0, 3.0]))

    found = compute_advantages("gdpo", AdvantageInputs(mask=MASK), whiten=True).advantages
    assert found.sum().abs() < 1e-6 and found.std() > 0.5


def test_taken_name_needs_overwrite():
    for taken in ("grpo", "ppo"):
        with pytest.raises(ValueError, match="already registered"):
            register("advantage", taken)
    replacement = register("advantage", "ppo", overwrite=True)(lambda inputs: inputs)
    assert resolve("advantage", "ppo") is replacement
    assert resolve("advantage", "gae") is not replacement


def test_user_extension_is_imported_by_path():
    import json

    assert resolve("reward", "json:dumps") is json.dumps


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no_such_package.x:f", r"reward function: must be importable, got 'no_such_package\.x', which was not found"),
        ("json:no_such", "reward function: must exist, got 'json:no_such'"),
        ("json:__name__", "reward function: must name a function, got 'json:__name__', which is a str"),
    ],
)
def test_failing_extension_is_a_value_error_naming_it(path, told):
    with pytest.raises(ValueError, match=told):
        resolve("reward", path)


def test_a_function_with_a_dot_before_its_name_gets_the_colon():
    with pytest.raises(ValueError, match=r"got 'own\.rewards\.score' \(did you mean own\.rewards:score\?\)"):
        resolve("reward", "own.rewards.score")
