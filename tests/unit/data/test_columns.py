"""What is said of a data set whose columns or files are not those that the job names."""

import pytest

from rl_core.api.data import DataSpec
from rl_core.api.errors import ConfigError, DataError
from rl_core.data.dataset import read_columns
from rl_core.data.source import read_rows


def test_malformed_lines_and_all_missing_columns_are_told_together(tmp_path):
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


def test_a_folder_without_parquet_files_is_told_as_one(tmp_path):
    (tmp_path / "data-00000-of-00001.arrow").write_text("x")
    with pytest.raises(
        ConfigError, match=r"a folder with \.parquet files, got a folder without any: .*; name a file in it"
    ):
        read_rows(str(tmp_path), field="data.train")
