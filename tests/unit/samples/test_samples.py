"""Kept samples come back as they were written, whatever happened to the files between."""

import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import ConfigError
from rl_core.api.records import Completion, FinishReason, PromptGroupRecord
from rl_core.batching.samples import keep_sample
from rl_core.cli.samples import Choice, select, show_samples
from rl_core.samples.lines import FILTERED, TRAIN, VALIDATION, array_of
from rl_core.samples.printing import REASONS, printable, render_sample
from rl_core.samples.reader import SampleReader
from rl_core.samples.writer import SampleWriter
from tests.unit.samples.kept import kept, line, write


def read(folder, split=TRAIN):
    reader = SampleReader(folder)
    reader.refresh()
    return reader, [reader.read(found) for found in reader.every(split)]


def test_a_sample_is_read_back_with_every_number(tmp_path):
    trainer = np.array([np.nan, np.nan, -0.4, -0.2, -0.1], np.float32)
    advantages = np.array([0, 0, 1, 1, 1], np.float32)
    SampleWriter(tmp_path / "samples", limit=10**6).write(
        [line(kept(advantages=advantages), trainer=trainer)], name="a"
    )
    _, (sample,) = read(tmp_path)
    original = kept()
    assert (sample["group"], sample["prompt_tokens"], sample["response_tokens"]) == ("0-1", 2, 3)
    for name, array in {"ids": original.token_ids, "mask": original.mask, "engine": original.engine, "trainer": trainer,
                        "advantage": advantages, "token_versions": original.token_versions}.items():  # fmt: skip
        assert np.array_equal(array_of(sample, name), array, equal_nan=array.dtype.kind == "f"), name


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=())), reward=st.floats(width=32))
def test_any_text_and_reward_make_one_ascii_line_that_reads_back(text, reward):
    data, entry = line(kept(text=text, reward=reward))
    assert data.isascii() and data.count(b"\n") == 1 and entry.length == len(data)
    assert json.loads(data)["messages"][1]["content"] == text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(), st.text(), st.none() | st.floats(), st.integers(1, 2)), min_size=1, max_size=6))
def test_the_index_says_what_the_lines_say(rows):
    with TemporaryDirectory() as name:
        folder, writer = Path(name), None
        for group, reason, reward, step in rows:
            writer = write(folder, [kept(group, reward=reward, reason=reason)], step=step, writer=writer)
        writer.close()
        (index,) = (folder / "samples").glob("*.index")
        indexed = read(folder)[0].every(TRAIN)
        index.unlink()
        assert indexed == read(folder)[0].every(TRAIN) and len(indexed) == len(rows)


def test_a_torn_line_is_passed_over_and_what_follows_is_read(tmp_path):
    write(tmp_path, [kept(index=0), kept(index=1)]).close()
    (data,) = (tmp_path / "samples").glob("*.jsonl")
    (index,) = (tmp_path / "samples").glob("*.index")
    data.write_bytes(data.read_bytes()[:-20])
    index.write_bytes(index.read_bytes()[:-3])
    assert [sample["index"] for sample in read(tmp_path)[1]] == [0]
    write(tmp_path, [kept(index=2)]).close()
    assert [sample["index"] for sample in read(tmp_path)[1]] == [0, 2]


@pytest.mark.parametrize("damage", [b"", b"not json\n[1,2]\n", b"\xff\xfe\n"], ids=["none", "damaged", "binary"])
def test_a_missing_or_damaged_index_is_made_from_the_lines(tmp_path, damage):
    write(tmp_path, [kept(index=0), kept(index=1)]).close()
    (index,) = (tmp_path / "samples").glob("*.index")
    index.write_bytes(damage) if damage else index.unlink()
    assert [sample["index"] for sample in read(tmp_path)[1]] == [0, 1]


def test_a_folder_is_read_while_it_is_written(tmp_path):
    reader, writer = SampleReader(tmp_path), None
    reader.refresh()  # nothing is there yet
    for step in (1, 2, 3):
        writer = write(tmp_path, [kept()], step=step, writer=writer)
        reader.refresh()
        assert reader.steps(TRAIN) == list(range(1, step + 1))


def test_the_oldest_files_make_room_and_the_reader_forgets_them(tmp_path):
    size, writer, reader = len(line(kept())[0]), None, SampleReader(tmp_path)
    for step in range(1, 101):
        writer = write(tmp_path, [kept()], step=step, limit=20 * size, writer=writer)
        reader.refresh()
    steps = reader.steps(TRAIN)
    assert steps[-1] == 100 and 10 <= len(steps) < 20 and steps == list(range(steps[0], 101))
    assert sum(path.stat().st_size for path in (tmp_path / "samples").iterdir()) <= 20 * size


def test_steps_that_a_later_epoch_trained_anew_are_those_of_the_later_epoch(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, [kept(text="first")], step=step).close()
    write(tmp_path, [kept(text="validated")], step=1, split=VALIDATION).close()
    write(tmp_path, [kept(text="second")], step=2, epoch=1).close()
    texts = [sample["messages"][1]["content"] for sample in read(tmp_path)[1]]
    assert texts == ["first", "second"] and len(read(tmp_path, VALIDATION)[1]) == 1


def test_storage_that_refuses_is_told_once_and_used_again_when_it_takes_more(tmp_path, caplog):
    (tmp_path / "samples").write_text("in the way")
    writer = SampleWriter(tmp_path / "samples", limit=10**6)
    with caplog.at_level(logging.WARNING):
        assert not any(writer.write([line(kept())], name="a") for _ in range(3))
    assert len(caplog.records) == 1 and "training goes on" in caplog.text
    (tmp_path / "samples").unlink()
    assert writer.write([line(kept())], name="a") and len(read(tmp_path)[1]) == 1


def test_worst_best_failed_and_group_choose_over_all_steps(tmp_path):
    writer = write(tmp_path, [kept("0-1", 0, reward=0.9), kept("0-1", 1, reward=float("nan"), reason="error")])
    write(tmp_path, [kept("0-2", 0, reward=-1.0), kept("0-2", 1, reward=2.0)], step=2, writer=writer)
    reader, _ = read(tmp_path)

    def chosen(**choice):
        return [(found.entry.group, found.entry.sample) for found in select(reader, Choice(**choice))]

    assert chosen(worst=True) == [("0-2", 0), ("0-1", 0), ("0-2", 1)]
    assert chosen(best=True)[0] == ("0-2", 1)
    assert chosen(failed=True) == [("0-1", 1)]
    assert chosen(group="0-1") == [("0-1", 0), ("0-1", 1)]
    assert chosen() == chosen(step=2) == [("0-2", 0), ("0-2", 1)]


def test_each_reason_is_explained_once_after_the_samples(tmp_path, capsys):
    reasons = ["terminated", "length", "terminated", "of a later version"]
    write(tmp_path, [kept(index=index, reason=reason) for index, reason in enumerate(reasons)])
    show_samples(tmp_path, Choice(limit=2))
    assert capsys.readouterr().out.endswith(
        "terminated: the environment ended the episode\n"
        "length: the completion was cut at rollout.sampling.maxNewTokens\n"
        "2 more; --limit 4 prints all\n"
    )
    assert set(REASONS) == {*FinishReason, FILTERED}


def test_samples_of_filtered_groups_are_chosen_and_say_why(tmp_path, capsys):
    write(tmp_path, [kept("0-1", 0), kept("0-2", 0, filtered="rewards must differ\x1b[0m")]).close()
    assert show_samples(tmp_path, Choice(filtered=True)) == 0
    printed = capsys.readouterr().out
    assert "group 0-2" in printed and "group 0-1" not in printed and "\x1b" not in printed
    assert "filtered, not trained: rewards must differ\\x1b[0m" in printed and "filtered: dynamic sampling" in printed
    assert show_samples(tmp_path, Choice(filtered=True, group="0-1")) == 0
    assert "none of these samples was filtered by dynamic sampling; steps" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="one of --worst, --best, --failed and --filtered"):
        show_samples(tmp_path, Choice(filtered=True, failed=True))


def test_that_no_sample_failed_is_no_error(tmp_path, capsys):
    write(tmp_path, [kept()])
    assert show_samples(tmp_path, Choice(failed=True)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("none of these samples failed; steps with samples: 1 to 1\n")
    assert "trying again" in shown and "rollout/redispatch_total" in shown
    for choice in (Choice(failed=True, step=2), Choice(failed=True, validation=True)):
        with pytest.raises(ConfigError, match="got none"):
            show_samples(tmp_path, choice)


def test_columns_are_printed_with_their_types(tmp_path, capsys):
    write(tmp_path, [kept(info={"text": "4", "number": 4, "none": None, "list": ["a", 1.0]})])
    show_samples(tmp_path, Choice())
    assert '   text: "4"; number: 4; none: null; list: ["a", 1.0]\n' in capsys.readouterr().out


def test_the_answer_is_printed_once(tmp_path, capsys):
    write(
        tmp_path,
        [kept(info={"answer": "4", "ground_truth": "4"}), kept(index=1, info={"answer": 4, "ground_truth": "4"})],
    )
    show_samples(tmp_path, Choice())
    printed = capsys.readouterr().out
    assert '   answer: "4"\n' in printed and '   answer: 4; ground_truth: "4"\n' in printed


def test_an_explanation_is_kept_and_printed_after_the_conversation(tmp_path, capsys):
    completion = Completion(message_log=[], reward=7.0, env_extras={"explanation": "good\x1b[0m\nwork", "answer": "4"})
    record = PromptGroupRecord(
        prompt_idx=0, prompt=[], extra_env_info={"answer": "4"}, metadata={}, group_id="0-1", completions=[completion]
    )
    sample = keep_sample(record, 0, group_id="0-1")
    assert sample.explanation == "good\x1b[0m\nwork"
    write(tmp_path, [kept(explanation=sample.explanation)])
    show_samples(tmp_path, Choice())
    assert "  answer\n[explanation of the reward]\n  good\\x1b[0m\n  work\n" in capsys.readouterr().out
    record.extra_env_info = {"explanation": "good\x1b[0m\nwork"}
    assert keep_sample(record, 0, group_id="0-1").explanation == "", "a column of the data"


def test_printing_a_hostile_sample_prints_nothing_that_a_terminal_acts_on(tmp_path, capsys):
    text = "\x1b[31mred\x07 \u202eright to left\u2066 \x9b2J \r\nnext \ud800 end"
    write(tmp_path, [kept("g\x1b[2J", text=text, role="as\x1bsistant")])
    assert show_samples(tmp_path, Choice()) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\r"} & set(printed)
    assert "\\x1b[31mred" in printed and "\\u202eright" in printed and "\\ud800" in printed


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_printable_text_can_be_encoded_and_has_no_control_characters(text):
    shown = printable(text)
    shown.encode()
    assert not any(character < " " and character not in "\n\t" for character in shown)


@pytest.mark.parametrize(
    ("split", "step", "place"),
    [(TRAIN, 0, "train before step 1"), (TRAIN, 3, "train step 3"), (VALIDATION, 0, "validation step 0")],
)
def test_failures_before_the_first_step_are_printed_as_such(split, step, place):
    sample = json.loads(line(kept(), split=split, step=step)[0])
    assert render_sample(sample).startswith(f"== {place} | group 0-1 sample 0 | ")


def test_messages_without_text_are_left_out_unless_the_model_wrote_them():
    messages = [("user", "2+2=", 2), ("assistant", "", 1), ("environment", "", 0)]
    sample = json.loads(line(kept(messages=tuple(messages)))[0])
    assert render_sample(sample).splitlines()[2:] == ["[user]", "  2+2=", "[assistant]", "  "]


def test_a_sample_of_a_megabyte_is_kept_and_printed(tmp_path):
    write(tmp_path, [kept(text="x" * 10**6)])
    _, (sample,) = read(tmp_path)
    assert "x" * 10**6 in render_sample(sample)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ANSWER", [0, 1]),
        ("straße", [2]),
        ("STRASSE", [2]),
        ("k", [3]),
        ('say "hi"', [4]),
        ("c:\\new", [4]),
        ("2+2=\nsay", [4]),
        ("pieces", []),
        ("ground_truth", []),
        ("", [0, 1, 2, 3, 4]),
    ],
)
def test_a_text_is_found_in_messages_only_whatever_its_case_and_however_it_is_escaped(tmp_path, text, found):
    contents = ["answer", "the Answer is", "Stra\u00dfe", "300 \u212a", 'say "hi" at c:\\new']
    write(tmp_path, [kept(index=index, text=content) for index, content in enumerate(contents)]).close()
    reader = SampleReader(tmp_path)
    reader.refresh()
    matches = reader.containing(reader.every(TRAIN), text)
    assert [sample["index"] for _, sample in matches] == found
