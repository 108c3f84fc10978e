"""The list of metrics knows each name that the code writes. tests/e2e looks at the names in the files of its runs."""

import ast
import json
import re
from pathlib import Path

import pytest

from rl_core.api.errors import ConfigError
from rl_core.cli.metrics import show_metrics
from rl_core.observability.metric_list import METRICS, find, search

ROOT = Path(__file__).parents[3] / "rl_core"
ROOMS = "reward|val|ledger|weights|perf|time|mismatch|offload|onload|data|dynamic_sampling"
NAME = re.compile(rf"(?:{ROOMS})/[a-z_@]+|(?:rollout|actor|train)/[a-z]+_[a-z_]+")
STATISTICS = frozenset({"mean_stat", "sum_stat", "std_stat", "Stat"})
FOLDERS = ("runner", "actors", "rollouts")


def written_names():
    """Yield the keys of dict displays that are metrics: by their form, or in a loss by the statistic that is their value."""
    for path in [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            for key in node.keys if isinstance(node, ast.Dict) else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and NAME.fullmatch(key.value):
                    yield key.value
    for path in (ROOT / "algorithms").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                statistic = isinstance(value, ast.Call) and getattr(value.func, "id", None) in STATISTICS
                if isinstance(key, ast.Constant) and statistic:
                    yield f"mismatch/{key.value}" if path.name == "mismatch.py" else f"train/{key.value}"


NAMES = sorted(set(written_names()))


def test_the_look_at_the_code_finds_metrics():
    assert {"weights/bytes", "val/accuracy", "train/entropy", "mismatch/kl", "ledger/acknowledged"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_in_the_code_is_listed(name):
    assert find(name) is not None


def test_a_form_stands_for_its_parts_only():
    assert find("reward/mean") and find("reward/std") and find("failures_total/judge/lost")
    assert find("reward/median") is None
    assert find("failures_total/judge") is None


def test_no_name_is_listed_twice():
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_word_finds_the_metrics_that_it_is_about():
    assert [metric.name for metric in search("val/pass@4")] == ["val/pass@<n>"]
    assert "train/staleness_<mean,max>" in {metric.name for metric in search("age of the trained")}


def test_the_command_prints_what_a_metric_means(capsys):
    assert show_metrics("val/accuracy") == 0
    assert "reward of at least 1" in capsys.readouterr().out


def test_of_an_output_folder_the_last_values_are_printed_with_their_meanings(tmp_path, capsys):
    lines = [{"step": 1, "val/accuracy": 0.25, "time/step": 2.5}, {"step": 2, "val/accuracy": None, "time/step": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert show_metrics(str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "val/accuracy: 0.25" in shown and "(step 1)" in shown and "reward of at least 1" in shown
    assert show_metrics(str(tmp_path), "time/step") == 0
    assert capsys.readouterr().out == "time/step: 3 s (step 2)\n    the whole step\n"
    with pytest.raises(ConfigError, match="must hold a metric loss"):
        show_metrics(str(tmp_path), "loss")
    with pytest.raises(ConfigError, match="must be the output folder of a run, got reward"):
        show_metrics("reward", "mean")


@pytest.mark.parametrize(
    "name", ["ledger/acknowledged", "ledger/dropped", "ledger/discarded", "rollout/redispatch_total"]
)
def test_a_name_with_an_entry_of_its_own_has_the_meaning_of_that_entry(name):
    assert find(name).name == name


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("ledger/pending", "ledger/<state>"),
        ("ledger/late_total", "ledger/<requeued,late>_total"),
        ("env/steps_total", "env/<steps,steps_total>"),
        ("rollout/mismatch_kl/age_1", "rollout/mismatch_kl/age_<number>"),
        ("rollout/mismatch_kl/length_256", "rollout/mismatch_kl/length_<number>"),
    ],
)
def test_of_several_entries_the_most_specific_one_counts(name, entry):
    assert find(name).name == entry


def test_metrics_in_a_row_with_one_meaning_are_explained_once(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "train/loss": 1.0}\n')
    show_metrics(str(tmp_path), "reward")
    meaning = find("reward/mean").meaning
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(meaning) == 1 and printed.index("reward/std: 0.1") < printed.index(meaning)
