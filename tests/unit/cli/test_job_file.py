"""A job file: one RLJob, alone or beside other objects."""

from pathlib import Path

import pytest
import yaml

from rl_core.api.errors import ConfigError
from rl_core.cli.job_file import JobProblems, load_job, read_document
from rl_core.cli.validate import missing_path_hint, validate_file
from tests.small_models import save_policy

JOB = "apiVersion: rljob.dev/v1alpha1\nkind: RLJob\nmetadata: {name: %s}\nspec: {}\n"
CLAIM = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: work}\n"


@pytest.mark.parametrize(
    "text", [JOB % "a", f"{CLAIM}---\n{JOB % 'a'}", f"---\n{JOB % 'a'}---\n"], ids=["alone", "beside", "marked"]
)
def test_the_one_job_of_a_file_is_read_and_overridden(tmp_path, text):
    (tmp_path / "job.yaml").write_text(text)
    found = read_document(tmp_path / "job.yaml", ["algorithm.steps=3"])
    assert found["metadata"]["name"] == "a" and found["spec"] == {"algorithm": {"steps": 3}}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{JOB % 'a'}---\n{JOB % 'b'}", r"got 2 \(a, b\)"),
        (f"{CLAIM}---\n{CLAIM}", r"got 0 \(none\)"),
        ("", "must hold one mapping"),
    ],
    ids=["two jobs", "no job", "empty"],
)
def test_a_file_with_two_jobs_or_none_is_refused(tmp_path, text, error):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_document(tmp_path / "job.yaml", [])


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("spec:\n  steps: 1\n    name: a\n", "mapping values are not allowed here (line 3, column 9)"),
        (
            "a: [1\nb: 2\n",
            "expected ',' or ']', but got ':' while parsing a flow sequence of line 1 (line 2, column 2)",
        ),
    ],
    ids=["indentation", "bracket"],
)
def test_an_error_of_yaml_is_one_line_with_its_place(tmp_path, text, cause):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_document(file, [])
    assert str(error.value) == f"{file}: must be valid YAML, got {cause}; correct the line or its indentation"


@pytest.mark.parametrize(
    ("spec", "error"),
    [("{a: 1, a: 2}", "the key 'a' twice"), ("{a: {b: 1, 'b': 2}}", "the key 'b' twice"), ("[{a: 1}, {a: 2}]", "")],
)
def test_a_key_that_a_mapping_has_twice_is_refused_with_its_line(tmp_path, spec, error):
    file = tmp_path / "job.yaml"
    file.write_text("kind: RLJob\nspec: %s\n" % spec)  # noqa: UP031 - braces
    if error:
        with pytest.raises(ConfigError, match=rf"job\.yaml: must be valid YAML, got {error} in one mapping .*line 2"):
            read_document(file, [])
    else:
        assert len(read_document(file, [])["spec"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "base: &base {a: 1, b: 1}\nspec: {<<: *base, a: 2}\n",
        # PyYAML adds the keys of `base` to `deep` before it constructs `deep`
        "base: &base {a: 1}\nall: {deep: &deep {<<: *base, a: 2}}\nspec: {<<: *deep, b: 1}\n",
    ],
    ids=["merged", "merged twice"],
)
def test_a_key_may_replace_one_of_a_merged_mapping(tmp_path, text):
    (tmp_path / "job.yaml").write_text(text)
    assert read_document(tmp_path / "job.yaml", [])["spec"] == {"a": 2, "b": 1}


@pytest.mark.parametrize("script", [True, False])
def test_a_missing_folder_that_a_script_beside_the_job_makes_is_no_name_of_the_hub(tmp_path, script):
    if script:
        (tmp_path / "prepare.py").touch()
    hint = (
        f", or make it with python {tmp_path}/prepare.py" if script else ", or write hf://student/model for that name"
    )
    assert missing_path_hint(str(tmp_path / "student/model"), tmp_path).startswith(hint)
    (tmp_path / "student/model").mkdir(parents=True)
    assert missing_path_hint(str(tmp_path / "student/model"), tmp_path) == ""


def test_what_lies_on_volumes_of_the_actor_is_left_to_the_pods(capsys):
    """The cluster's example is valid on a machine that has neither its model nor its data."""
    file = Path(__file__).parents[3] / "examples" / "arithmetic" / "rljob.yaml"
    assert validate_file(file, []) == 0
    output = capsys.readouterr().out
    assert "valid (arithmetic: grpo, 60 steps)" in output and "spec.model.path, spec.data.train" in output
    with pytest.raises(JobProblems, match=r"spec\.model\.path"):
        validate_file(file, [f"actor.{field}=[]" for field in ("volumes", "volumeMounts", "initContainers")])


def test_a_volume_for_checkpoints_hides_no_problem_of_what_is_not_on_it(tmp_path):
    (tmp_path / "train.jsonl").write_text("{oops\n")
    file = Path(__file__).parents[3] / "examples" / "arithmetic" / "rljob.yaml"
    with pytest.raises(JobProblems, match=r"spec\.data\.train: .*train\.jsonl:1:"):
        validate_file(file, [f"data.train={tmp_path}/train.jsonl"])


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        (r"optimizer\.schedule\.warmupSteps", ["actor.optimizer.schedule={style: linear, warmupSteps: 5}"]),
        ("criticWarmupSteps", ["algorithm.name=gae", "actor.criticWarmupSteps=5"]),
    ],
    ids=["schedule", "critic"],
)
def test_a_warm_up_that_does_not_fit_the_run_is_refused_before_anything_starts(field, settings):
    file = Path(__file__).parents[3] / "examples" / "arithmetic" / "rljob.yaml"
    with pytest.raises(JobProblems, match=rf"spec\.actor\.{field} must be below the run's 5 .*got 5"):
        validate_file(file, ["algorithm.steps=5", *settings])


def test_weights_cut_short_and_bad_rows_are_reported_together_each_on_a_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n{oops\n[1]\n')
    file = Path(__file__).parents[3] / "examples" / "arithmetic" / "rljob.yaml"
    settings = [f"actor.{field}=[]" for field in ("volumes", "volumeMounts", "initContainers")]
    places = [f"model.path={tmp_path}", f"data.train={tmp_path}/train.jsonl", "data.validation=null"]
    with pytest.raises(JobProblems) as error:
        validate_file(file, [*settings, *places])
    problems = "\n".join(error.value.problems)
    assert "model.safetensors must be a whole safetensors file" in problems
    rows = [line for line in error.value.problems if line.startswith("spec.data.train: ")]
    assert len(rows) == 3 and "train.jsonl:2:" in rows[0] and "train.jsonl:3:" in rows[1]
    assert "must have the column 'answer' (data.answerKey), got ['prompt']" in rows[2]


def test_a_program_that_calls_a_model_without_a_chat_template_is_refused(tmp_path):
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "talk"},
        "spec": {
            "model": {"path": str(save_policy(tmp_path / "model"))},
            "data": {"train": "rows.jsonl"},
            "env": {"type": "agent", "command": ["true"]},
        },
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1"}]}\n')
    with pytest.raises(JobProblems, match=r"spec\.data\.chatTemplate: must be given for env.type agent"):
        validate_file(file, [])
    assert validate_file(file, ["data.chatTemplate='{{ messages[0].content }}'"]) == 0


PLAIN = '{"prompt": "1+1=", "answer": "2"}\n'
MESSAGES = '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'


@pytest.mark.parametrize(
    ("row", "template", "settings", "warned"),
    [
        (PLAIN, True, [], True),
        (PLAIN, True, ["data.chat=false"], False),
        (PLAIN, True, ["data.chat=true"], False),
        (MESSAGES, True, [], False),
        (PLAIN, False, [], False),
    ],
    ids=["not given", "false", "true", "messages", "no template"],
)
def test_plain_prompts_for_a_model_with_a_chat_template_are_warned_of(
    tmp_path, capsys, row, template, settings, warned
):
    model = save_policy(tmp_path / "model")
    if template:
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    document = yaml.safe_load((JOB % "chat").replace("{}", "{model: {path: model}, data: {train: rows.jsonl}}"))
    (tmp_path / "rows.jsonl").write_text(row)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    assert validate_file(tmp_path / "job.yaml", settings) == 0
    warning = "warning: the model has a chat template, but the prompts of spec.data.train are plain text"
    assert (warning in capsys.readouterr().err) == warned


def test_which_fields_are_given_is_known_after_loading(tmp_path):
    (tmp_path / "job.yaml").write_text((JOB % "a").replace("{}", "{model: {path: m}, data: {train: t}}"))
    assert load_job(tmp_path / "job.yaml").spec.data.model_fields_set == {"train"}
    assert load_job(tmp_path / "job.yaml", ["data.chat=false"]).spec.data.model_fields_set == {"train", "chat"}


CODE = """
from rl_core.algorithms import AdvantageResult

def fine(inputs):
    return AdvantageResult(inputs.rewards[:, None] * inputs.mask)
"""


def test_an_estimator_of_the_user_is_tried_before_a_run(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    file = tmp_path / "job.yaml"
    file.write_text((Path(__file__).parents[3] / "examples" / "arithmetic" / "rljob.yaml").read_text())
    assert validate_file(file, ["algorithm.name=mine:fine"]) == 0
    with pytest.raises(JobProblems) as error:
        validate_file(file, ["algorithm.name=mine:absent", "algorithm.loss.name=no_such_module:f"])
    name, loss = error.value.problems
    assert (
        name.startswith("spec.algorithm.name: ")
        and "got 'mine:absent': mine has no 'absent'; it defines AdvantageResult, fine" in name
    )
    assert loss.startswith("spec.algorithm.loss.name: ") and "got 'no_such_module', which was not found" in loss


def test_files_are_looked_at_although_the_schema_is_broken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n{oops\n')
    spec = "{model: {path: .}, data: {train: train.jsonl, validation: none.jsonl}, algorithm: {steps: -1}}"
    (tmp_path / "job.yaml").write_text((JOB % "a").replace("{}", spec))
    with pytest.raises(JobProblems) as error:
        validate_file(tmp_path / "job.yaml", [])
    steps, tokenizer, weights, row, answer, validation = error.value.problems
    assert steps.startswith("spec.algorithm.steps: must be greater than or equal to 1, got -1")
    assert tokenizer.startswith("spec.model.path: ") and "tokenizer" in tokenizer
    assert weights.startswith("spec.model.path: must hold safetensors weights")
    assert row.startswith("spec.data.train: ") and "train.jsonl:2:" in row
    assert answer.startswith("spec.data.train: must have the column 'answer' (data.answerKey), got ['prompt']")
    assert validation.startswith("spec.data.validation: must be an existing file")


@pytest.mark.parametrize(
    ("env", "missing"),
    [("{type: math}", ["question", "answer"]), ("{reward: 'mine:f'}", ["question"]), ("{type: mathh}", ["question"])],
    ids=["answers", "reward without a type", "misspelled"],
)
def test_columns_are_looked_for_beside_settings_that_break_the_schema(tmp_path, env, missing):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    spec = "{data: {train: train.jsonl, promptKey: question}, rollout: {sampling: {temprature: 1}}, env: ENV}"
    (tmp_path / "job.yaml").write_text((JOB % "a").replace("{}", spec.replace("ENV", env)))
    with pytest.raises(JobProblems) as error:
        validate_file(tmp_path / "job.yaml", [])
    problems = "\n".join(error.value.problems)
    assert "spec.rollout.sampling.temprature: is not a known field" in problems
    assert [name for name in ("question", "answer") if f"must have the column '{name}'" in problems] == missing


@pytest.mark.parametrize(
    "spec",
    [
        "[]",
        "{model: 3, data: {train: 4}}",
        "{model: {path: []}, data: x}",
        "{actor: {volumeMounts: [{}]}, model: {path: x}}",
    ],
)
def test_of_a_document_of_another_shape_only_schema_problems_are_reported(tmp_path, spec):
    (tmp_path / "job.yaml").write_text((JOB % "a").replace("{}", spec))
    with pytest.raises(JobProblems) as error:
        validate_file(tmp_path / "job.yaml", [])
    assert not [line for line in error.value.problems if "config.json" in line or "existing file" in line]


def test_a_model_that_a_script_beside_the_job_makes_is_not_taken_for_a_name_of_the_hub(tmp_path):
    (tmp_path / "prepare.py").write_text("")
    (tmp_path / "job.yaml").write_text(
        (JOB % "a").replace("{}", "{model: {path: student/model}, data: {train: a.jsonl}}")
    )
    with pytest.raises(JobProblems) as error:
        validate_file(tmp_path / "job.yaml", [])
    model, data = error.value.problems
    assert all(line.endswith(f", or make it with python {tmp_path}/prepare.py") for line in (model, data))
    assert "hf://" not in model


def test_prompts_that_are_left_out_are_counted(tmp_path, capsys):
    save_policy(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "1", "answer": "1"}\n' + '{"prompt": "%s", "answer": "1"}\n' % ("1 " * 40)
    )
    spec = "{model: {path: model}, data: {train: train.jsonl}, env: {reward: exact, type: reward}, rollout: ROLLOUT}"
    rollout = "{maxSequenceLength: 16, sampling: {maxNewTokens: 4}}"
    (tmp_path / "job.yaml").write_text((JOB % "a").replace("{}", spec.replace("ROLLOUT", rollout)))
    assert validate_file(tmp_path / "job.yaml", []) == 0
    assert "warning: spec.data.train: 1 of 2 prompts are left out" in capsys.readouterr().err


def test_a_name_of_the_hub_gets_its_scheme(tmp_path):
    spec = "{model: {path: Qwen/Qwen2.5-0.5B}, data: {train: openai/gsm8k, validation: hf://openai/gsm8k}}"
    (tmp_path / "job.yaml").write_text((JOB % "a").replace("{}", spec))
    with pytest.raises(JobProblems) as error:
        validate_file(tmp_path / "job.yaml", [])
    model, train, validation = error.value.problems
    assert "or write hf://Qwen/Qwen2.5-0.5B for that name on the Hugging Face hub" in model
    assert "or write hf://openai/gsm8k?split=train[&config=CONFIG] or hf://openai/gsm8k/FILE.parquet for that" in train
    assert "must name a split, ?split=train, with &config=NAME if" in validation


def test_an_absolute_path_is_not_taken_for_a_name_of_the_hub(tmp_path):
    (tmp_path / "jobs").mkdir()
    spec = f"{{model: {{path: {tmp_path}/models/qwen}}, data: {{train: {tmp_path}/sets/train}}}}"
    (tmp_path / "jobs/job.yaml").write_text((JOB % "a").replace("{}", spec))
    with pytest.raises(JobProblems) as error:
        validate_file(tmp_path / "jobs/job.yaml", [])
    assert [line for line in error.value.problems if "config.json" in line]
    assert not [line for line in error.value.problems if "hf://" in line]


@pytest.mark.parametrize(("name", "field"), [("enviroment", "env"), ("rollout", "rollout"), ("algoritm", "algorithm")])
def test_a_field_of_spec_beside_spec_is_shown_its_place(tmp_path, name, field):
    (tmp_path / "job.yaml").write_text((JOB % "a") + f"\n{name}: {{}}\n")
    with pytest.raises(JobProblems) as error:
        validate_file(tmp_path / "job.yaml", [])
    assert f"{name}: is not a known field, got {{}}, did you mean spec.{field}?" in error.value.problems
