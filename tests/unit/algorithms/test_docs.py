"""docs/algorithms.md names what there is: every estimator, loss, aggregation, KL, correction and field, no other, and YAML that is valid."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from rl_core.algorithms.registry import names
from rl_core.api.algorithm import ADVANTAGE_ALIASES, ADVANTAGES, AlgorithmSpec
from rl_core.api.critic import CriticSpec
from rl_core.api.loss import CLIP, CLIPS, IMPORTANCE_BOUNDS, LOSSES, Aggregation, ImportanceSpec, LossSpec

TEXT = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
EXAMPLES = re.findall(r"^\| ([^|]+) \| `(\{.+\})` \|$", TEXT, flags=re.MULTILINE)


def table(heading):
    """Return the rows of the table whose first column is called `heading`, as lists of cells."""
    _, _, rest = TEXT.partition(f"\n| {heading} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    assert lines, heading
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]


def named(heading):
    """Return the names in the first column of a table, other spellings included."""
    return [name for row in table(heading) for name in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize(("algorithm", "spec"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_yaml_of_an_algorithm_is_valid(algorithm, spec):
    AlgorithmSpec.model_validate(yaml.safe_load(spec))


def test_there_is_yaml_for_every_estimator_and_loss():
    specs = [AlgorithmSpec.model_validate(yaml.safe_load(spec)) for _, spec in EXAMPLES]
    assert {spec.name for spec in specs} == set(ADVANTAGES)
    assert {spec.loss.name for spec in specs} == set(LOSSES)


def test_the_table_of_estimators_is_that_of_the_schema_and_the_rest_of_the_registry_is_named():
    estimators = re.findall(r"^\| (`.+?) \|", TEXT.partition("## Advantages")[2].partition("##")[0], flags=re.MULTILINE)
    found = {name for cell in estimators for name in re.findall(r"`([^`]+)`", cell)}
    assert found == {*ADVANTAGES, *ADVANTAGE_ALIASES}
    unreached = re.search(r"cannot be named in YAML: (.*?)\n\n", TEXT, flags=re.DOTALL).group(1)
    assert set(re.findall(r"`(\w+)`", unreached)) == set(names("advantage")) - set(ADVANTAGES)


def test_the_table_of_losses_is_that_of_the_schema_with_its_clips():
    losses = TEXT.partition("## Losses")[2].partition("The library's loss")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", losses, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(LOSSES)
    clips = {name: "{:g}, {:g}".format(*CLIPS.get(name, CLIP)) for name, _ in rows} | {"reinforce": "none"}
    assert dict(rows) == clips
    assert set(names("loss")) - set(LOSSES) == set(re.findall(r"library's loss `(\w+)`", TEXT))


def test_aggregations_estimators_of_kl_and_corrections_are_those_of_the_schema():
    assert named("value") == list(get_args(Aggregation))
    assert named("`loss.klEstimator`") == list(get_args(LossSpec.model_fields["kl_estimator"].annotation))
    rows = {row[0].strip("`"): row[2] for row in table("`importance.mode`")}
    assert rows == {mode: "{:g}, {:g}".format(*bounds) for mode, bounds in IMPORTANCE_BOUNDS.items()}


@pytest.mark.parametrize("spec", [AlgorithmSpec, LossSpec, CriticSpec, ImportanceSpec])
def test_every_field_that_changes_the_mathematics_is_named(spec):
    of_the_loop = {
        "promptsPerStep", "groupSize", "steps", "maxStaleness", "stragglerSeconds", "seed", "optimizerStepsPerBatch", "updateEpochs",
        "maxGenerationBatches", "onDrop", "minBatchFraction", "maxDroppedGroups", "maxConsecutiveDrops", "loss",
    }  # fmt: skip
    fields = {field.alias for field in spec.model_fields.values()} - of_the_loop
    assert [field for field in sorted(fields) if not re.search(rf"[`.]{field}\b", TEXT)] == []
