"""`rljob init` writes jobs that are valid as they are, and overwrites nothing."""

import json

import pytest

from rl_core.api.errors import ConfigError
from rl_core.cli.init import DEFAULT_MODEL, TASKS, init, inspect
from rl_core.cli.job_file import load_job
from rl_core.cli.validate import find_reference_problems
from tests.small_models import save_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder without a chat template."""
    return save_policy(tmp_path_factory.mktemp("model"))


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("task", TASKS)
def test_the_job_of_each_task_and_its_code_pass_all_checks(tmp_path, model, task):
    folder = tmp_path / f"My {task} job!"
    assert init(folder, task=task, model=str(model), gpus=0) == 0
    job = load_job(folder / "job.yaml")
    assert job.metadata.name == f"my-{task}-job" and job.spec.rollout.max_sequence_length == 64
    assert list(find_reference_problems(job, search_path=folder)) == []
    assert len((folder / "README.md").read_text().splitlines()) <= 14


def test_validation_finds_token_ids_that_the_model_does_not_have(tmp_path, model):
    init(tmp_path, task="math", model=str(model), gpus=0)
    biased = [
        "rollout.sampling.logitBias={'999999': -1}",
        "algorithm.allowTruncatedSampling=true",
        "algorithm.recomputeLogProbs=true",
    ]
    (problem,) = find_reference_problems(load_job(tmp_path / "job.yaml", biased), search_path=tmp_path)
    assert problem.startswith("spec.rollout.sampling.logitBias must have token ids below the model's vocab_size"), (
        problem
    )


@pytest.mark.parametrize(("gpus", "mode"), [(1, "colocated"), (2, "disaggregated"), (8, "disaggregated")])
def test_a_job_for_accelerators_fits_on_those_that_are_there(tmp_path, capsys, gpus, mode):
    init(tmp_path, task="math", model=None, gpus=gpus)
    job = load_job(tmp_path / "job.yaml")
    assert (job.spec.model.path, job.spec.placement.mode, job.spec.rollout.engine) == (DEFAULT_MODEL, mode, "sglang")
    assert job.spec.data.chat_template is None and job.spec.actor.gradient_checkpointing
    assert "; rljob plan job.yaml; " in capsys.readouterr().out
    assert list(find_reference_problems(job, search_path=tmp_path)) == []


def test_the_written_reward_prefers_the_right_answer(tmp_path, model):
    init(tmp_path, task="reward", model=str(model), gpus=0)
    names = {}
    exec((tmp_path / "reward.py").read_text(), names)
    assert names["score"](["?"] * 3, ["so 1,042", "7", "no idea"], ["1042", "8", "9"]) == [1.0, 0.1, 0.0]


def test_the_written_environment_ends_with_the_right_guess_or_after_five(tmp_path, model):
    init(tmp_path, task="multi-turn", model=str(model), gpus=0)
    names = {}
    exec((tmp_path / "environment.py").read_text(), names)
    guess = names["Guess"]().answer
    observation, metadata, _, reward, over, _ = guess("I say 3", {"answer": "7"})
    assert (observation["content"], reward, over) == ("Higher.", 0.0, False)
    assert guess("7", metadata)[3:5] == (0.5, True)
    assert guess("?", {"answer": "7", "turn": 4})[3:5] == (0.0, True)


def test_a_folder_that_holds_one_of_the_files_is_left_as_it_is(tmp_path, model):
    (tmp_path / "reward.py").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"must not hold reward\.py: init overwrites nothing"):
        init(tmp_path, task="reward", model=str(model), gpus=0)
    assert contents(tmp_path) == before
    assert init(tmp_path, task="multi-turn", model=str(model), gpus=0) == 0  # beside files of other names
    assert (tmp_path / "reward.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "words"),
    [({"task": "maths"}, "--task must be one of math, reward"), ({"model": "nowhere"}, "--model must be a folder")],
)
def test_a_wrong_choice_is_refused_and_nothing_is_written(tmp_path, given, words):
    with pytest.raises(ConfigError, match=words):
        init(tmp_path / "new", **{"task": "math", "model": None, "gpus": 0, **given})
    assert not (tmp_path / "new").exists()


def test_without_a_terminal_the_task_must_be_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="got none"):
        init(None, task=None, model=None, gpus=0)


def test_on_a_terminal_questions_are_asked_for_what_was_not_given(tmp_path, monkeypatch):
    answers = iter(["agent", "hf://me/model", str(tmp_path / "asked")])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda text, default: next(answers))
    init(None, task=None, model=None, gpus=0)
    assert load_job(tmp_path / "asked/job.yaml").spec.model.path == "hf://me/model"


def test_a_name_of_the_hub_is_taken_with_and_without_its_scheme(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    assert inspect("Qwen/Qwen3-8B") == inspect("hf://Qwen/Qwen3-8B")
    (model / "chat_template.jinja").write_text(json.dumps("{{ messages }}"))
    assert inspect(str(model)).has_chat_template
    (model / "chat_template.jinja").unlink()
