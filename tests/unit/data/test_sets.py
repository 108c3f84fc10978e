"""Several data sets: what a job may write, which samples they give, and in which order they are mixed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.api.data import DataSpec, whole_weights
from rl_core.data.dataset import load_sets
from rl_core.data.source import read_rows
from rl_core.data.tokenizer import Tokenizer
from rl_core.runner.prompt_order import Part, PromptOrder
from rl_core.runner.text import mixture
from tests.small_models import save_policy

PARTS = st.lists(st.builds(Part, st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({}, "data must have exactly one of train, sets, got 0"),
        ({"train": "t", "sets": [{"name": "a", "train": "t"}]}, "data must have exactly one of train, sets, got 2"),
        ({"validation": "v", "sets": [{"name": "a", "train": "t"}]}, "validation must be part of an entry of sets"),
        ({"sets": [{"name": "a", "train": "t"}, {"name": "a", "train": "u"}]}, "unique names, got a more than once"),
        ({"sets": [{"name": "a", "validation": "v"}]}, "sets must have an entry with train, got none"),
        (
            {"sets": [{"name": "a", "train": "t", "weight": 1}, {"name": "b", "train": "u"}]},
            "sets must have a weight in each entry with train or in none",
        ),
        ({"sets": [{"name": "a"}]}, "a data set must have train or validation, got neither"),
        ({"sets": [{"name": "a", "validation": "v", "weight": 1}]}, "weight is for training prompts, got no train"),
        ({"sets": [{"name": "a/b", "train": "t"}]}, "at most 32 letters"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, refusal):
    with pytest.raises(ValidationError, match=refusal):
        DataSpec.model_validate(given)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sets_are_loaded_behind_each_other_with_columns_and_names_of_their_own(tmp_path):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    tokenizer = Tokenizer.from_folder(save_policy(tmp_path / "model"))
    chats = tmp_path / "chats"
    chats.mkdir()
    for number in (1, 0):
        messages = [{"role": "user", "content": f"{number}+1="}]
        write_table(Table.from_pylist([{"messages": messages, "solution": "1"}]), chats / f"000{number}.parquet")
    sums = [
        {"prompt": "1+2=", "answer": "3", "data_source": "mine"},
        {"prompt": "1" * 80, "answer": "1"},
        {"prompt": "2=", "answer": "2"},
    ]
    data = DataSpec.model_validate(
        {
            "chatTemplate": "{{ messages[0].content }}",
            "sets": [
                {"name": "chats", "train": str(chats), "promptKey": "messages", "answerKey": "solution", "weight": 0.5},
                {"name": "sums", "train": write(tmp_path / "sums.jsonl", sums), "weight": 1.5},
                {"name": "held", "validation": str(tmp_path / "sums.jsonl")},
            ],
        }
    )
    # Settings of messages are refused where a set has texts only, as in a single data set.
    loaded = load_sets(
        data.model_copy(update={"chat": True}), tokenizer, validation=False, task_name="math", max_seq_len=40
    )
    assert [one["message_log"][0]["content"] for one in loaded.samples] == ["0+1=", "1+1=", "1+2=", "2="]
    assert [one["data_set"] for one in loaded.samples] == ["chats", "chats", "sums", "sums"]
    assert [one["extra_env_info"]["data_source"] for one in loaded.samples] == ["chats", "chats", "mine", "sums"]
    assert [one["extra_env_info"]["ground_truth"] for one in loaded.samples] == ["1", "1", "3", "2"]
    assert [one["idx"] for one in loaded.samples] == [0, 1, 2, 4]
    assert loaded.dropped_overlong == 1 and loaded.sizes == (2, 2)
    assert mixture(data, loaded.sizes) == [Part(2, 1), Part(2, 3)]
    held = load_sets(
        data.model_copy(update={"chat": True}), tokenizer, validation=True, task_name="math", max_seq_len=40
    )
    assert [one["data_set"] for one in held.samples] == ["held", "held"]
    assert read_rows(str(chats), field="data.train", name="x")[0]["data_source"] == "x"


def test_a_single_data_set_gets_no_column_and_no_name(tmp_path):
    tokenizer = Tokenizer.from_folder(save_policy(tmp_path / "model"))
    data = DataSpec(train=write(tmp_path / "a.jsonl", [{"prompt": "1=", "answer": "1"}]))
    loaded = load_sets(data, tokenizer, validation=False, task_name="math", max_seq_len=40)
    assert "data_set" not in loaded[0] and loaded[0]["extra_env_info"] == {"answer": "1", "ground_truth": "1"}
    assert mixture(data, loaded.sizes) == [Part(1, 1)]
    assert not load_sets(data, tokenizer, validation=True, task_name="math", max_seq_len=40).samples


def test_weights_are_the_decimal_numbers_that_are_written():
    assert whole_weights([0.1, 0.2, 3.0]) == [1, 2, 30]
    assert whole_weights([1e-7, 1.0]) == [1, 10**7]


@given(PARTS, st.integers(0, 3), st.booleans())
def test_each_set_gets_its_share_and_goes_through_its_prompts_pass_by_pass(parts, seed, shuffle):
    order, total = PromptOrder(parts, seed=seed, shuffle=shuffle), sum(weight for _, weight in parts)
    starts = [sum(size for size, _ in parts[:n]) for n in range(len(parts))]
    seen = [[] for _ in parts]
    for position in range(120):
        index = order.index_at(position)
        part = max(n for n, start in enumerate(starts) if start <= index)
        data_epoch = len(seen[part]) // parts[part].size
        seen[part].append(index - starts[part])
        assert order.group_id(position) == f"{data_epoch}-{index}"
        assert all(abs(len(mine) - (position + 1) * w / total) < len(parts) + 1e-9 for mine, (_, w) in zip(seen, parts))
    for mine, (size, _) in zip(seen, parts):
        whole = [mine[start : start + size] for start in range(0, len(mine) - size + 1, size)]
        assert all(sorted(one) == list(range(size)) and (shuffle or one == list(range(size))) for one in whole)


@given(PARTS, st.booleans(), st.integers(0, 10**12))
def test_an_order_far_along_is_found_at_once_and_back(parts, shuffle, position):
    order = PromptOrder(parts, seed=1, shuffle=shuffle, prefix="p-")
    group_id = order.group_id(position)
    assert order.position(group_id, end=position + 1) == position
    assert order.position(group_id, end=position) is None
    assert PromptOrder(parts, seed=1, shuffle=shuffle, prefix="p-").group_id(position) == group_id


@pytest.mark.parametrize("text", ["p-", "p-1", "p-1-", "p-x-1", "p-0-9", "p-00-1", ""])
def test_text_that_is_no_group_id_has_no_position(text):
    assert PromptOrder([Part(3, 1), Part(4, 2)], seed=1, shuffle=True, prefix="p-").position(text, end=100) is None
