"""A job that is made in Python is refused in the words of `rljob validate`."""

import functools
import json
import re

import pytest
import yaml
from pydantic import ValidationError

from rl_core.api.job import RLJob
from rl_core.api.problems import problem_lines
from rl_core.cli.problems import find_problems

HEAD = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}}
SPEC = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
MADE = {
    "mapping": RLJob.model_validate,
    "json": lambda document: RLJob.model_validate_json(json.dumps(document)),
    "keywords": lambda document: RLJob(**document),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"num_generations": 8}, "spec.num_generations: is not a known field, got 8, write algorithm.groupSize"),
        ({"enviroment": {}}, "spec.enviroment: is not a known field, got {}, did you mean env?"),
        ({"actor": {"backend": "fsdp"}}, "spec.actor.backend: must be 'fsdp1', 'fsdp2' or 'megatron', got 'fsdp', did you mean fsdp2?"),
        ({"actor": {"replicas": "x"}}, "spec.actor.replicas: must be a valid integer, got 'x', write a value of that type"),
        ({"trackers": "wandb"}, "spec.trackers: must be a valid list, got 'wandb', write [{name: wandb}], and with --set in quotes: "
         "--set 'trackers=[{name: wandb}]'"),
        ({"actor": {"profileSteps": 3}}, "spec.actor.profileSteps: must be a valid list, got 3, write [3], and with --set in quotes: "
         "--set 'actor.profileSteps=[3]'"),
        ({"model": {}}, "spec.model.path: must be given, got nothing, add it"),
        ({"data": 3}, "spec.data: must be a mapping of fields, got 3, indent its fields below it"),
    ],
)  # fmt: skip
def test_the_error_has_the_line_of_the_command(made, spec, line):
    document = HEAD | {"spec": SPEC | spec}
    with pytest.raises(ValidationError) as error:
        made(document)
    assert problem_lines(error.value) == [line] == find_problems(document)[1]
    assert line.partition(": ")[2] in str(error.value)


def test_each_broken_rule_of_a_block_is_a_part_of_its_own():
    env = {"type": "rewards", "reward": "a:f", "agent": "a:f"}
    with pytest.raises(ValidationError) as error:
        RLJob.model_validate(HEAD | {"spec": SPEC | {"env": env}})
    reward, agent = problem_lines(error.value)
    assert reward.startswith("spec.env: reward must be given") and agent.startswith("spec.env: exactly one of agent")
    assert [detail["type"] for detail in error.value.errors()] == ["value_error", "value_error"]


def test_fields_in_the_spelling_of_python_stay_valid_in_python():
    assert RLJob.model_validate(HEAD | {"spec": SPEC | {"algorithm": {"group_size": 4}}}).spec.algorithm.group_size == 4


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        (("trackers",), "wandb", [{"name": "wandb"}]),
        (("actor", "profileSteps"), 3, [3]),
        (("rollout", "sampling", "stop"), "a: b # c", ["a: b # c"]),
        (("actor", "optimizer", "betas"), 0.9, [0.9]),
    ],
)
def test_the_list_that_an_error_proposes_is_a_list_of_the_value(path, value, read):
    spec = functools.reduce(lambda inner, name: {name: inner}, reversed(path), value)
    (line,) = find_problems(HEAD | {"spec": SPEC | spec})[1]
    proposed = re.search(r"--set '([\w.]+)=(.*)'$", line)
    assert proposed and proposed[1] == ".".join(path)
    assert yaml.safe_load(proposed[2]) == read and f"write {proposed[2]}, " in line
