"""`rljob validate` tells every problem at once, each with path, rule, value and way out."""

import copy

import pytest

from rl_core.api.field_hints import fields_at
from rl_core.api.foreign_names import foreign_names
from rl_core.api.job import RLJob
from rl_core.cli import validate
from rl_core.cli.problems import find_problems

GOOD = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "a"},
    "spec": {"model": {"path": "m"}, "data": {"train": "t.jsonl"}},
}


def job(**spec):
    document = copy.deepcopy(GOOD)
    document["spec"] |= spec
    return document


def test_a_good_job_has_no_problems():
    found, problems = find_problems(GOOD)
    assert found is not None and problems == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"algorithm": {"groupSize": 1}}, ["spec.algorithm", "groupSize must be at least 2", "got 1"]),
        (
            {"algorithm": {"promptsPerStep": 3}, "actor": {"replicas": 2}},
            ["divisible by the actor's data-parallel size 2", "got 3"],
        ),
        ({"rollout": {"replicas": 1, "minReplicas": 2}}, ["minReplicas must not exceed replicas 1", "got 2", "lower"]),
        ({"data": {"trian": "x", "train": "y"}}, ["spec.data.trian", "not a known field", "did you mean train?"]),
        ({"algorithm": {"steps": "many"}}, ["spec.algorithm.steps", "valid integer", "got 'many'"]),
        ({"algorithm": {"name": "ppo2"}}, ["spec.algorithm.name", "grpo", "module:function", "got ppo2"]),
        ({"rollout": {"sampling": {"topP": 0.9}}}, ["topP", "biases the policy ratio"]),
        (
            {"rollout": {"sampling": {"temperature": 0}}},
            ["spec.rollout.sampling.temperature", "greater than 0", "got 0"],
        ),
        ({"actor": {"env": {"RANK": "1"}}}, ["env must not set variables the launcher owns", "RANK"]),
        ({"actor": {"backend": "deepspeed"}}, ["spec.actor.backend", "fsdp2"]),
        (
            {"env": {"type": "reward", "reward": ["a:f", "a:g"]}},
            ["spec.env.reward: must name one function", '{"reward": SUM, "parts": {NAME: NUMBER', "got ['a:f', 'a:g']"],
        ),
        ({"env": {"type": "reward"}}, ["reward must be given exactly when type is `reward`"]),
        ({"algorithm": {"importance": {}}}, ["needs recomputeLogProbs: true"]),
        ({"actor": {"optimizer": {"learningRate": float("nan")}}}, ["spec.actor.optimizer.learningRate", "finite"]),
        ({"model": {}}, ["spec.model.path", "must be given"]),
    ],
)
def test_a_problem_names_path_rule_value_and_way_out(spec, words):
    found, problems = find_problems(job(**spec))
    assert found is None and len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems[0]


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ({"algorithm": {"num_generations": 8}}, "write algorithm.groupSize"),
        ({"num_generations": 8}, "write algorithm.groupSize"),
        ({"actor": {"learning_rate": 1e-5}}, "write actor.optimizer.learningRate"),
        ({"actor": {"learningRate": 1e-5}}, "write actor.optimizer.learningRate"),
        ({"algorithm": {"learningrate": 1e-5}}, "did you mean actor.optimizer.learningRate?"),
        ({"rollout": {"temperature": 0.5}}, "write rollout.sampling.temperature"),
        (
            {"algorithm": {"estimator": "grpo"}},
            "write algorithm.name (`grpo`, `dr_grpo` (no deviation, other aggregation), `rloo`, `gae` and others)",
        ),
        (
            {"algorithm": {"advantageEstimator": "grpo"}},
            "write algorithm.name (`grpo`, `dr_grpo` (no deviation, other aggregation), `rloo`, `gae` and others)",
        ),
        (
            {"algorithm": {"loss": {"estimator": "k3"}}},
            "write algorithm.loss.klEstimator (verl's `low_var_kl` is `k3`, `mse` `k2` and `kl` `k1`)",
        ),
        ({"algorithm": {"loss": {"type": "ppo"}}}, "write algorithm.loss.name"),
        ({"algorithm": {"n_samples_per_prompt": 8}}, "write algorithm.groupSize"),
        ({"validation": {"interval": 8}}, "write validation.everySteps"),
        ({"rollout": {"gpu": 1}}, "did you mean gpus?"),
        ({"enviroment": {"type": "math"}}, "did you mean env?"),
        ({"actor": {"xyzzy": 1}}, "remove it; docs/reference/rljob.md lists the fields"),
        ({"algorithm": {"loss": {"clip_low": 0.1}}}, "write clipLow"),
        ({"trackers": [{"name": "wandb", "projects": "x"}]}, "did you mean project?"),
        (
            {"actor": {"optimizer": {"name": "adam"}}},
            "remove it or use one of: betas, distributed, eps, learningRate, schedule, valueLearningRate, weightDecay",
        ),
    ],
)
def test_an_unknown_field_gets_the_name_it_has_here(spec, hint):
    (problem,) = find_problems(job(**spec))[1]
    assert "is not a known field" in problem and problem.endswith(hint), problem


@pytest.mark.parametrize(
    ("spec", "place", "hint"),
    [
        ({"algorithm": {"name": "grop"}}, "spec.algorithm.name: ", "(did you mean grpo?)"),
        (
            {"algorithm": {"name": "dapo"}},
            "spec.algorithm.name: ",
            "(DAPO is grpo with loss.clipHigh, dynamicSampling and overlong: docs/algorithms.md)",
        ),
        ({"algorithm": {"loss": {"name": "sapo"}}}, "spec.algorithm.loss.name: ", "; correct the name"),
        ({"algorithm": {"name": "GRPO"}}, "spec.algorithm.name: ", "(did you mean grpo?)"),
        (
            {"rollout": {"sampling": {"topK": -1}}},
            "spec.rollout.sampling.topK: ",
            "change the value; if -1 is meant to switch it off, docs/reference/rljob.md says how",
        ),
        ({"algorithm": {"loss": {"name": "ppo_clipp"}}}, "spec.algorithm.loss.name: ", "(did you mean ppo_clip?)"),
        (
            {"algorithm": {"loss": {"name": "grpo"}}},
            "spec.algorithm.loss.name: ",
            "(the loss of GRPO is ppo_clip: docs/algorithms.md)",
        ),
        ({"algorithm": {"loss": {"klEstimator": "low_var_kl"}}}, "spec.algorithm.loss.klEstimator: ", "write k3"),
        (
            {"model": {"path": "m", "lora": {"targets": "all-linear"}}},
            "spec.model.lora.targets: ",
            "all linear layers are the default",
        ),
        ({"trackers": "none"}, "spec.trackers: ", "--set 'trackers=[]'"),
        ({"trackers": ["wandb"]}, "spec.trackers.0: ", "write {name: wandb}"),
        ({"model": "folder"}, "spec.model: ", "write {path: folder}"),
        ({"placement": {"mode": "colocate"}}, "spec.placement.mode: ", "did you mean colocated?"),
        ({"rollout": {"engine": "sgl"}}, "spec.rollout.engine: ", "did you mean sglang?"),
        ({"rollout": {"engine": "vllm"}}, "spec.rollout.engine: ", "choose one of these"),
        ({"program": "async"}, "spec.program: ", "(did you mean asynchronous?)"),
        ({"trackers": [{"name": "tensorbord"}]}, "spec.trackers.0.name: ", "did you mean tensorboard?"),
        ({"env": {"type": "rewards", "reward": "a:f"}}, "spec.env: ", "(did you mean reward?)"),
        ({"env": {"type": "agents", "agent": "a:f"}}, "spec.env: ", "(did you mean agent?)"),
        ({"env": {"type": "math", "reward": "a:f"}}, "spec.env: ", "set both or neither"),
    ],
)
def test_a_misspelled_choice_gets_the_nearest_one(spec, place, hint):
    (problem,) = find_problems(job(**spec))[1]
    assert problem.startswith(place) and problem.endswith(hint), problem


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        (
            {"trainer": {"nnodes": 1, "val_before_train": True}},
            ["actor.replicas for nnodes", "validation.beforeTraining for val_before_train"],
        ),
        (
            {"actor_rollout_ref": {"rollout": {"n": 4}, "actor": {"optim": {"lr": 1e-6}}}},
            ["algorithm.groupSize for n", "actor.optimizer.learningRate for lr"],
        ),
        (
            {"actor": {"optim": {"lr": 1e-6, "nothing": 3}}},
            ["actor.optimizer.learningRate for lr", "nothing for nothing: no name that is known here"],
        ),
        (
            {"actor_rollout_ref": {name: {"fsdp_config": {"param_offload": True}} for name in ("actor", "ref")}},
            [
                "actor.offload.params for actor.fsdp_config.param_offload",
                "nothing for ref.fsdp_config.param_offload: Its weights lie in host memory, and are exchanged with those of the actor for a pass",
            ],
        ),
        (
            {"algorithm": {"filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 10}}},
            [
                "algorithm.dynamicSampling.enabled for enable",
                "nothing for metric: A group is filtered if its raw rewards do not differ",
                "algorithm.maxGenerationBatches for max_num_gen_batches",
            ],
        ),
    ],
)
def test_a_block_of_another_library_gets_a_line_for_each_setting_in_it(spec, hint):
    (problem,) = find_problems(job(**spec))[1]
    first, *lines = problem.splitlines()
    assert first.endswith("write in its place:") and [line.strip() for line in lines] == hint, problem


def test_the_number_of_settings_in_a_block_is_not_limited():
    names = [
        "lr",
        "temperature",
        "ppo_epochs",
        "kl_loss_coef",
        "loss_agg_mode",
        "entropy_coeff",
        "top_p",
        "val_before_train",
        "save_freq",
    ]
    (problem,) = find_problems(job(actor_rollout_ref=dict.fromkeys(names, 1)))[1]
    assert len(problem.splitlines()) == 1 + len(names) and all(f" for {name}" in problem for name in names), problem


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        (
            {"algorithm": {"kl_ctrl": {"kl_coef": 0.1}}},
            "write algorithm.rewardKlCoefficient for kl_coef (In the rewards; in the loss: `algorithm.loss.klCoefficient`)",
        ),
        ({"actor": {"fsdp_config": {"param_offload": True}}}, "write actor.offload.params for param_offload"),
        ({"reward_model": {"overlong_buffer": {"len": 4096}}}, "write algorithm.overlong.buffer for len"),
        ({"nothing": {"path": "a", "n": 3}}, "docs/reference/rljob.md lists the fields"),
        ({"rollouts": {"temperature": 1.0}}, "did you mean rollout?"),
    ],
)
def test_an_unknown_block_with_one_setting_or_of_no_library_gets_one_line(spec, hint):
    (problem,) = find_problems(job(**spec))[1]
    assert problem.endswith(hint), problem


def test_a_setting_that_must_be_given_has_one_problem_under_the_name_of_another_library():
    document = job(model_name_or_path="folder", train_dataset="t.jsonl")
    del document["spec"]["model"], document["spec"]["data"]
    problems = find_problems(document)[1]
    assert [line.partition(": ")[0] for line in problems] == ["spec.model_name_or_path", "spec.train_dataset"], problems


def test_a_misspelled_field_that_must_be_given_is_one_problem_and_what_is_in_it_is_checked():
    document = job(mdel={"path": 3})
    del document["spec"]["model"]
    document["metdata"] = document.pop("metadata")
    assert find_problems(document)[1] == [
        "spec.mdel: is not a known field, got {'path': 3}, did you mean model?",
        "metdata: is not a known field, got {'name': 'a'}, did you mean metadata?",
        "spec.model.path: must be a valid string, got 3, write a value of that type",
    ]


def test_a_type_that_is_left_out_is_named():
    (problem,) = find_problems(job(env={"reward": "a:f"}))[1]
    assert problem.endswith("(type is math where it is left out; write type: reward)")


def test_snake_case_is_refused_and_the_value_is_checked_nevertheless():
    problems = find_problems(job(algorithm={"group_size": 1, "prompts_per_step": 8}))[1]
    assert problems[:2] == [
        "spec.algorithm.group_size: is not a known field, write groupSize",
        "spec.algorithm.prompts_per_step: is not a known field, write promptsPerStep",
    ]
    assert "groupSize must be at least 2" in problems[2] and len(problems) == 3


def test_keys_that_the_user_chooses_may_be_of_any_case():
    spec = {"env": {"options": {"my_key": 1}}, "actor": {"labels": {"image_pull_policy": "x"}}}
    assert find_problems(job(**spec))[1] == []


def test_every_name_of_another_library_leads_to_a_field_that_exists():
    for setting in foreign_names():
        block, _, field = setting.ours.rpartition(".")
        if setting.ours.startswith("rljob "):
            continue
        if not setting.ours:
            assert setting.note and setting.note.endswith("."), setting
            continue
        where = ("spec", *filter(None, block.split(".")))
        assert field in fields_at(RLJob, ("metadata",) if block == "metadata" else where), setting.ours


@pytest.mark.parametrize(
    ("spec", "way_out"),
    [
        ({"rollout": {"n": 8}}, "write algorithm.groupSize"),
        (
            {"algorithm": {"importance_sampling_level": "sequence"}},
            "write algorithm.loss.name (TRL's `sequence` is `gspo`)",
        ),
        ({"algorithm": {"loss_type": "dapo"}}, "write algorithm.loss.aggregation (`dapo` is `token-mean`"),
        ({"algorithm": {"epsilon": 0.1}}, "write algorithm.loss.clipLow (Where their setting is one number"),
        ({"rollout": {"vllm_mode": "colocate"}}, "write placement.mode"),
        ({"steps": 4}, "did you mean algorithm.steps?"),
        ({"seed": 4}, "write algorithm.seed"),
        ({"model": {"path": "m", "lora": {"r": 8}}}, "write model.lora.rank"),
        ({"reward_funcs": ["a:b"]}, "write env.reward (One `module:function`"),
        ({"reward_model": {"path": "x", "enable": True}}, "write groups (Its worker is `rl_core.groups.reward_model"),
        ({"rewardModel": {"model": {"path": "x"}}}, "write groups (Its worker is"),
        ({"reward": {"model": {"path": "x"}}}, "write groups for path"),
    ],
)
def test_a_setting_that_means_something_else_here_says_so(spec, way_out):
    (problem,) = find_problems(job(**spec))[1]
    assert way_out in problem, problem


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ({"algorithm": {"maxStaleness": 2}, "rollout": {"replicas": 3, "gpus": 1}}, "algorithm.maxStaleness must be 0"),
        ({"rollout": {"replicas": 3, "gpus": 1}}, "rollout.gpus must equal actor.gpus"),
        ({"rollout": {"replicas": 3}}, "rollout.replicas must be actor.replicas"),
    ],
)
def test_a_combination_is_refused_by_its_first_cause(spec, cause):
    (problem,) = find_problems(job(placement={"mode": "colocated"}, **spec))[1]
    assert problem.startswith(f"spec: {cause}"), problem


def test_a_rule_over_a_field_that_was_replaced_by_its_default_is_left_out():
    """The rule of colocated devices would say that actor.gpus is 0."""
    document = job(
        actor={"gpus": 1, "backend": "megatron", "parallel": {"tensor": 4}},
        rollout={"engine": "sglang", "gpus": 1},
        placement={"mode": "colocated"},
    )
    (problem,) = find_problems(document)[1]
    assert problem.startswith("spec.actor: ")


def test_independent_problems_are_told_together_with_cross_field_ones():
    spec = {
        "data": {"train": "t", "nonsense": 1},
        "algorithm": {"groupSize": 1, "steps": -1},
        "rollout": {"replicas": 1, "minReplicas": 3},
        "actor": {"replicas": 5},
    }
    text = "\n".join(find_problems(job(**spec))[1])
    for word in ("nonsense", "groupSize", "steps", "minReplicas", "data-parallel size 5"):
        assert word in text, f"{word} is not in:\n{text}"


@pytest.mark.parametrize(
    "document",
    [{}, {"kind": "RLJob"}, {"spec": 3, "metadata": []}, GOOD | {"kind": "Job"}, GOOD | {"metadata": {"name": "A_b"}}],
)
def test_a_broken_outline_is_told_not_raised(document):
    found, problems = find_problems(document)
    assert found is None and problems


def test_a_check_that_takes_long_says_every_few_seconds_what_is_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(validate, "WAITING_S", 0.01)
    told = ""
    with validate._waiting_for("the reward of the job"):
        while told.count("waiting for the reward of the job (") < 2:
            told += capsys.readouterr().err
    assert "waiting" not in capsys.readouterr().err.rpartition("waiting for the reward")[0]


def test_a_rule_about_a_value_that_stands_for_an_invalid_one_is_not_reported():
    (problem,) = find_problems(job(env={"reward": {"path": "a.py"}}))[1]
    assert problem.startswith("spec.env.reward: must be a valid string")
