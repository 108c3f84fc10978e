"""docs/data.md names every field of `data` and `validation` with its default, and its rows are rows."""

import re
from pathlib import Path

import pytest

from rl_core.api.data import DataSpec
from rl_core.api.settings import ValidationSpec
from rl_core.data.dataset import load_prompts
from rl_core.data.tokenizer import Tokenizer
from tests.small_models import save_policy

PAGE = (Path(__file__).parents[3] / "docs/data.md").read_text()
ROW = re.compile(r"^\| `(data|validation)\.(\w+)` \| ([^|]*)\| (.+) \|$", re.MULTILINE)
WORDS = {"none", "all", "the tokenizer's"}
"""What the page says of a default that is null."""


@pytest.mark.parametrize(("block", "model"), [("data", DataSpec), ("validation", ValidationSpec)])
def test_the_table_has_every_field_with_its_default(block, model):
    table = {name: default for of, name, default, _ in ROW.findall(PAGE) if of == block}
    assert set(table) == {field.alias for field in model.model_fields.values()}
    defaults = {field.alias: field.get_default() for field in model.model_fields.values() if not field.is_required()}
    for name, value in defaults.items():
        shown = (
            WORDS
            if value is None
            else {f"{value:g}"}
            if type(value) in (int, float)
            else {f"`{str(value).lower()}`", f"`{value}`"}
        )
        assert table[name].strip() in shown, name


def test_the_rows_of_the_page_are_read_as_they_stand(tmp_path):
    rows = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    tokenizer = Tokenizer.from_folder(save_policy(tmp_path / "model"))
    assert len(rows) == 2
    for number, row in enumerate(rows):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(row)
        data = DataSpec(train=str(file), chatTemplate="{{ messages[0].content }}" if number else None)
        loaded = load_prompts(str(file), data, tokenizer, field="data.train", task_name="math", max_seq_len=64)
        assert loaded[0]["extra_env_info"] == {"answer": "133", "ground_truth": "133"}
