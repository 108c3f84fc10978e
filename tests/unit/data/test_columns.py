"""Errors about data sets whose columns or files are not those that the job names."""

import json

import pytest

from rl_core.api.data import DataSpec
from rl_core.api.errors import ConfigError, DataError
from rl_core.data.dataset import load_prompts, read_columns
from rl_core.data.examples import example_rows
from rl_core.data.source import read_rows
from rl_core.data.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    folder = tmp_path / "model"
    folder.mkdir()
    Backend(models.WordLevel({"<pad>": 0, "<eos>": 1, "1": 2}, unk_token="<pad>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    return Tokenizer.from_folder(folder)


def test_malformed_lines_and_all_missing_columns_are_reported_together(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1", "reward_model": {"ground_truth": "2"}}\n{oops\n')
    data = DataSpec(train=str(path), answerKey="reward_model.ground_truth")
    with pytest.raises(DataError) as error:
        read_columns(str(path), data, field="data.train", task_name="math")
    malformed, prompt, answer = str(error.value).splitlines()
    assert malformed.startswith(f"{path}:2: a line must be one JSON object")
    assert prompt.startswith(
        "data.train must have the column 'prompt' (data.promptKey), got ['question', 'reward_model']"
    )
    assert answer.endswith(
        "correct data.answerKey, or write reward_model.ground_truth of the column 'reward_model' as a column of its own"
    )


def test_malformed_lines_and_unusable_rows_are_reported_together_with_their_numbers(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    good, answerless = '{"prompt": "1", "answer": "2"}', '{"prompt": "1", "answer": null}'
    path.write_text("\n".join([good, "{oops", answerless, good, '{"prompt": 1, "answer": "2"}']))
    data = DataSpec(train=str(path))
    with pytest.raises(DataError) as error:
        load_prompts(str(path), data, tokenizer, field="data.train", task_name="math", max_seq_len=100)
    malformed, answer, prompt = str(error.value).splitlines()
    assert malformed.startswith(f"{path}:2: a line must be one JSON object")
    assert answer.startswith("data.train row 3: column 'answer'")
    assert prompt.startswith("data.train row 5: ")


def test_a_folder_without_parquet_files_is_refused_as_one(tmp_path):
    (tmp_path / "data-00000-of-00001.arrow").write_text("x")
    with pytest.raises(
        ConfigError, match=r"a folder with \.parquet files, got a folder without any: .*; name a file in it"
    ):
        read_rows(str(tmp_path), field="data.train")


@pytest.mark.parametrize(("task", "refused"), [("reward", True), ("agent", False)])
def test_a_prompt_that_ends_with_a_reply_is_refused_where_the_model_would_read_it(tmp_path, tokenizer, task, refused):
    path = tmp_path / "a.jsonl"
    ask, reply = ({"role": role, "content": "1"} for role in ("user", "assistant"))
    path.write_text("".join(json.dumps({"messages": log}) + "\n" for log in ([ask], [ask, reply], [ask, reply, ask])))
    data = DataSpec(train=str(path), promptKey="messages", chatTemplate="{{ messages[0].content }}")
    settings = {"field": "data.train", "task_name": task, "max_seq_len": 100}
    if not refused:
        assert len(load_prompts(str(path), data, tokenizer, **settings)) == 3
        return
    with pytest.raises(DataError) as error:
        load_prompts(str(path), data, tokenizer, **settings)
    assert str(error.value).startswith("data.train row 2: column 'messages' must end with a message to the model")


def test_rows_that_a_run_leaves_out_are_no_examples():
    rows = {0: {"prompt": "1"}, 2: {"prompt": "2", "answer": "2"}, 3: {"prompt": "3", "answer": None}}
    found = example_rows(rows, DataSpec(train="t"), field="data.train", task_name="math")
    assert list(found) == ["data.train row 3"]


def test_a_row_keeps_its_number_behind_a_line_that_is_left_out(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{oops\n{"prompt": "1"}\n{"prompt": 2}\n')
    data = DataSpec(train=str(path), max_bad_rows=1)
    (sample,) = load_prompts(str(path), data, tokenizer, field="data.train", task_name="reward", max_seq_len=9).samples
    assert sample["source"] == "a.jsonl row 2" and sample["idx"] == 1
