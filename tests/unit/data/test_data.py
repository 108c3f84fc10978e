"""Reading prompts: what is accepted, what is refused with file and line, and that messages keep their own tokens."""

import json
from datetime import date

import numpy as np
import pytest

from rl_core.api.data import DataSpec
from rl_core.api.errors import ConfigError, DataError
from rl_core.data.dataset import load_prompts
from rl_core.data.examples import example_rows
from rl_core.data.source import read_rows
from rl_core.data.tokenizer import Tokenizer, read_files

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    names = ["<pad>", "<eos>", "<unk>", *dict.fromkeys("0123456789+= <>/abcdefghijklmnopqrstuvwxyz")]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": CHAT})
    )
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return Tokenizer.from_folder(model_folder)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(reference, tokenizer, *, max_seq_len=100, **data):
    spec = DataSpec.model_validate({"train": reference, **data})
    return load_prompts(reference, spec, tokenizer, field="data.train", task_name="reward", max_seq_len=max_seq_len)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_config_file_that_holds_no_object_is_refused(model_folder, name):
    files = read_files(model_folder) | {name: b"[]"}
    with pytest.raises(ConfigError, match="must hold JSON objects"):
        Tokenizer.from_files(files)


def test_a_text_prompt_becomes_one_user_message_with_its_tokens_and_ground_truth(tmp_path, tokenizer):
    sample = load(write(tmp_path / "a.jsonl", {"prompt": "1+2=", "answer": "3", "level": 7}), tokenizer)[0]
    assert tokenizer.decode(sample["message_log"][0]["token_ids"]) == "1+2="
    assert sample["message_log"][0]["token_ids"].dtype == np.int64
    assert sample["length"] == 4 and sample["idx"] == 0
    assert sample["extra_env_info"] == {"answer": "3", "level": 7, "ground_truth": "3"}


def test_with_chat_a_text_prompt_is_what_the_same_user_message_is(tmp_path, tokenizer):
    text = load(write(tmp_path / "a.jsonl", {"prompt": "1+2="}), tokenizer, chat=True, systemPrompt="be kind")[0]
    message = [{"role": "user", "content": "1+2="}]
    listed = load(write(tmp_path / "b.jsonl", {"prompt": message}), tokenizer, systemPrompt="be kind")[0]
    assert [one["role"] for one in text["message_log"]] == ["system", "user"]
    ids = [np.concatenate([one["token_ids"] for one in sample["message_log"]]) for sample in (text, listed)]
    assert ids[0].tolist() == ids[1].tolist()
    assert tokenizer.decode(ids[0]) == "<system>be kind</system><user>1+2=</user><assistant>"
    assert text["length"] == listed["length"] == len(ids[0])


def test_with_chat_messages_stay_and_an_empty_text_is_refused(tmp_path, tokenizer):
    message = {"prompt": [{"role": "user", "content": "hi"}]}
    sample = load(write(tmp_path / "a.jsonl", message), tokenizer, chat=True)[0]
    assert tokenizer.decode(sample["message_log"][0]["token_ids"]) == "<user>hi</user><assistant>"
    with pytest.raises(DataError, match="data.train row 2: column 'prompt' must be text or a list"):
        load(write(tmp_path / "b.jsonl", message, {"prompt": ""}), tokenizer, chat=True)


def test_a_conversation_is_rendered_once_and_cut_at_its_messages(tmp_path, tokenizer):
    prompt = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go"},
    ]
    sample = load(write(tmp_path / "a.jsonl", {"prompt": prompt}), tokenizer, systemPrompt="be kind")[0]
    texts = [tokenizer.decode(message["token_ids"]) for message in sample["message_log"]]
    assert [message["role"] for message in sample["message_log"]] == ["system", "user", "assistant", "user"]
    assert "".join(texts) == tokenizer.apply_chat_template(
        [{"role": "system", "content": "be kind"}, *prompt], add_generation_prompt=True
    )
    assert texts[2] == "<assistant>yes</assistant>" and texts[3].endswith("</user><assistant>")


def test_a_template_that_is_not_incremental_keeps_all_tokens(tmp_path, tokenizer):
    prompt = [{"role": "user", "content": "hi"}, {"role": "user", "content": "go"}]
    sample = load(
        write(tmp_path / "a.jsonl", {"prompt": prompt}),
        tokenizer,
        chatTemplate="{{ messages[-1]['content'] }} {{ messages[0]['content'] }}",
    )[0]
    assert "".join(tokenizer.decode(m["token_ids"]) for m in sample["message_log"]) == "go hi"


TURNS = [
    {"role": "system", "content": "ab"},
    {"role": "user", "content": "cd"},
    {"role": "assistant", "content": "e"},
    {"role": "user", "content": "f"},
]


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["ab", "cd", "e", "f"]),
        (
            "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}<think>{% endif %}{{ m.content }}{% endfor %}",
            ["ab", "cd", "", "ef"],
        ),
        (
            "{% if messages[-1].role != 'user' %}{{ raise_exception('a user must ask') }}{% endif %}"
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            ["", "abcd", "", "ef"],
        ),
    ],
    ids=["every-prefix", "one-is-rendered-otherwise", "some-are-refused"],
)
def test_the_tokens_of_the_messages_are_the_conversation_whatever_a_template_makes_of_its_prefixes(
    tmp_path, tokenizer, template, texts
):
    sample = load(write(tmp_path / "a.jsonl", {"prompt": TURNS}), tokenizer, chatTemplate=template)[0]
    assert [tokenizer.decode(message["token_ids"]) for message in sample["message_log"]] == texts
    assert sample["length"] == 6


def test_a_template_sees_all_of_a_message_and_the_log_its_role_and_text(tmp_path, tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}], "name": None}
    path = write(
        tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "go"}, call, {"role": "user", "content": ""}]}
    )
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.name is defined %}?{% endif %}"
        "{% if m.tool_calls %}={{ m.tool_calls[0].name }}{% endif %}{% endfor %}"
    )
    log = load(path, tokenizer, chatTemplate=template)[0]["message_log"]
    assert "".join(tokenizer.decode(message["token_ids"]) for message in log) == "go=add"
    assert all(set(message) == {"role", "content", "token_ids"} for message in log)


def test_a_template_that_fails_on_a_row_names_the_row(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in "ab"]
    template = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}x"
    with pytest.raises(ConfigError, match="data.train row 2: chat template must render the prompt, got: no b"):
        load(write(tmp_path / "a.jsonl", *rows), tokenizer, chatTemplate=template)


@pytest.mark.parametrize("setting", ["systemPrompt", "chatTemplate"])
def test_settings_of_conversations_are_refused_where_there_is_none(tmp_path, tokenizer, setting):
    with pytest.raises(ConfigError, match=f"data.train must hold message lists for data.{setting}, got text prompts"):
        load(write(tmp_path / "a.jsonl", {"prompt": "1"}), tokenizer, **{setting: "be kind"})


@pytest.mark.parametrize(
    ("prompt", "template"), [([{"role": "user", "content": "hi"}], "{{ '' }}"), ("\u200b", None)], ids=["chat", "text"]
)
def test_a_prompt_without_a_token_is_refused(tmp_path, model_folder, prompt, template):
    from tokenizers import normalizers

    tokenizer = Tokenizer.from_folder(model_folder)
    tokenizer.backend.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(DataError, match="data.train row 2: a prompt must have a token, got none"):
        rows = [{"prompt": [{"role": "user", "content": "x"}] if template else "1"}, {"prompt": prompt}]
        template = template and "{% if messages[0].content == 'x' %}x{% endif %}"
        load(write(tmp_path / "a.jsonl", *rows), tokenizer, **({"chatTemplate": template} if template else {}))


def test_of_a_prompt_that_is_far_too_long_only_a_head_is_turned_into_tokens(tmp_path, tokenizer, monkeypatch):
    longest = []
    encode = Tokenizer.__call__

    def watched(self, text, **options):
        longest.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "__call__", watched)
    path = write(tmp_path / "a.jsonl", {"prompt": "1" * 100_000}, {"prompt": "1"})
    assert load(path, tokenizer, max_seq_len=10).dropped_overlong == 1 and max(longest) <= 1000


def test_a_long_text_of_few_tokens_is_a_prompt_as_it_is(tmp_path, model_folder):
    from tokenizers import normalizers

    tokenizer = Tokenizer.from_folder(model_folder)
    tokenizer.backend.normalizer = normalizers.Replace("-", "")
    path = write(tmp_path / "a.jsonl", {"prompt": "-" * 10_000 + "12"})
    assert load(path, tokenizer, max_seq_len=10)[0]["length"] == 2


def test_overlong_prompts_are_dropped_and_counted_or_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "1+2="}, {"prompt": "1" * 10}, {"prompt": "2+2="})
    found = load(path, tokenizer, max_seq_len=10)
    assert [sample["idx"] for sample in found.samples] == [0, 2] and found.dropped_overlong == 1
    with pytest.raises(
        DataError, match="row 2: a prompt must be shorter than the sequence limit of 10 tokens, got at least 10"
    ):
        load(path, tokenizer, max_seq_len=10, onOverlong="refuse")
    with pytest.raises(ConfigError, match="must hold a prompt shorter than 4 tokens, got 3 longer ones"):
        load(path, tokenizer, max_seq_len=4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"a\.jsonl:2: a line must be one JSON object"),
        ("[1]", r"a\.jsonl:2: a line must be a JSON object, got list"),
        ("[" * 100_000, r"a\.jsonl:2: a line must be one JSON object, got maximum recursion depth"),
        ('{"prompt": "x",}', r"a\.jsonl:2: a line must be one JSON object, got [A-Z][a-z ]* at character 16"),
        ('{"prompt": "x", "prompt": "y"}', r"a\.jsonl:2: a line must be one JSON object, got the key 'prompt' twice"),
        ('{"prompt": "x", "m": {"k": 1, "k": 1}}', r"a\.jsonl:2: .* got the key 'k' twice"),
    ],
)
def test_a_malformed_line_is_told_with_its_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_rows(str(path), field="data.train")


def test_all_malformed_lines_are_told_at_once_the_first_ten_one_by_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n' + "{oops\n" * 13)
    with pytest.raises(DataError) as error:
        read_rows(str(path), field="data.train")
    lines = str(error.value).splitlines()
    assert [line.removeprefix(f"{path}:").split(":")[0] for line in lines[:10]] == [str(n) for n in range(2, 12)]
    assert lines[10:] == [f"{path}: malformed lines: 3 more"]


def test_every_row_without_an_answer_is_told_where_the_environment_cannot_do_without(tmp_path, tokenizer):
    rows = [
        {"prompt": "1", "answer": 1},
        {"prompt": "2"},
        {"prompt": "3", "answer": "3"},
        {"prompt": "4", "answer": None},
        {"prompt": "5", "answer": " "},
        {"prompt": "6", "answer": float("nan")},
        {"prompt": "7", "answer": True},
        {"prompt": "8", "answer": ["8"] * 1000},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    data = DataSpec(train=path)
    with pytest.raises(DataError) as error:
        load_prompts(path, data, tokenizer, field="data.train", task_name="math", max_seq_len=10)
    told = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert told == [f"data.train row {row}" for row in (2, 5, 6, 7, 8)] and "data.answerKey" in str(error.value)
    assert str(error.value).splitlines()[0].endswith("correct the row or data.answerKey (and 1 more rows: 4)")
    assert len(str(error.value)) < 2000
    assert len(load_prompts(path, data, tokenizer, field="data.train", task_name="reward", max_seq_len=10)) == 8


def test_bad_rows_within_the_budget_are_left_out_and_logged(tmp_path, tokenizer, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1"}\n{oops\n{"prompt": 2}\n{"prompt": "3"}\n')
    data = DataSpec(train=str(path), max_bad_rows=1)
    found = load_prompts(str(path), data, tokenizer, field="data.train", task_name="reward", max_seq_len=10)
    assert [sample["message_log"][0]["content"] for sample in found.samples] == ["1", "3"]
    assert caplog.text.count("1 left out, of data.maxBadRows 1") == 2 and "a.jsonl:2" in caplog.text
    with pytest.raises(DataError, match="a.jsonl:2: a line must be one JSON object"):
        load_prompts(
            str(path), DataSpec(train=str(path)), tokenizer, field="data.train", task_name="reward", max_seq_len=10
        )


def test_a_column_that_no_row_has_is_one_problem_for_an_environment_that_needs_it(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", *({"prompt": str(n), "solution": "1"} for n in range(20)))
    with pytest.raises(ConfigError) as error:
        load_prompts(path, DataSpec(train=path), tokenizer, field="data.train", task_name="math", max_seq_len=10)
    assert str(error.value).splitlines() == [
        "data.train must have the column 'answer' (data.answerKey), got ['prompt', 'solution']; correct data.answerKey"
    ]


def test_a_column_missing_in_one_of_several_sets_is_named_with_the_setting_of_that_set(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"question": "x"})
    with pytest.raises(ConfigError) as error:
        load_prompts(
            path,
            DataSpec(train=path),
            tokenizer,
            field="data.sets.1.train",
            name="b",
            task_name="reward",
            max_seq_len=10,
        )
    assert str(error.value) == (
        "data.sets.1.train must have the column 'prompt' (data.sets.1.promptKey), got ['data_source', 'question']; "
        "correct data.sets.1.promptKey"
    )


def test_example_rows_are_the_first_two_and_one_of_each_further_set_of_filled_columns():
    rows = [{"prompt": "1", "answer": "1"}] * 5 + [{"prompt": "2", "answer": None}, {"answer": "3"}, {"prompt": "4"}]
    found = example_rows(dict(enumerate(rows)), DataSpec(train="t"), field="data.train", task_name="reward")
    assert list(found) == ["data.train row 1", "data.train row 2", "data.train row 6"]
    row = found["data.train row 6"]
    assert row.metadata == {"answer": None, "ground_truth": None}
    assert row.messages == [{"role": "user", "content": "2"}, {"role": "assistant", "content": "0"}]


def test_an_answer_column_that_is_named_must_be_there(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "solution": 1}, {"prompt": "1", "result": 1})
    assert len(load(path, tokenizer, answerKey="result")) == 2
    with pytest.raises(
        ConfigError, match=r"must have the column 'truth' \(data.answerKey\), got \['prompt', 'solution'\]"
    ):
        load(path, tokenizer, answerKey="truth")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "must hold at least one row"),
        ("a.csv", "x", "must end in .jsonl or .parquet"),
        (None, "", "must be an existing file"),
        ("a" * 300, None, "must be readable, got .*: File name too long"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path, name, content, message):
    path = tmp_path / (name or "absent.jsonl")
    if content is not None and name:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(str(path), field="data.train")


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf%s\n%s\n", b"%s\r\n\r\n%s\r\n", b"\n%s\n\n%s"], ids=["bom", "crlf", "blank"]
)
def test_marks_and_ends_of_lines_of_any_system_are_taken(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content % (b'{"prompt": "1"}', b'{"prompt": "2"}'))
    assert read_rows(str(tmp_path / "a.jsonl"), field="data.train") == [{"prompt": "1"}, {"prompt": "2"}]


@pytest.mark.parametrize("role", [["user"], None, "environment"])
def test_a_message_of_no_known_role_is_told_with_its_row(tmp_path, tokenizer, role):
    with pytest.raises(DataError, match="data.train row 1: column 'prompt' must be text or a list of {role, content}"):
        load(write(tmp_path / "a.jsonl", {"prompt": [{"role": role, "content": "x"}]}), tokenizer)


def test_a_missing_prompt_column_names_the_columns_there_are(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"must have the column 'prompt' \(data.promptKey\), got \['question'\]"):
        load(write(tmp_path / "a.jsonl", {"question": "x"}), tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "2", "answer": 100000000000000000000}', "integer at answer must fit into int64"),
        ('{"prompt": "2", "answer": "\\ud800"}', "a text in the message is not valid unicode"),
        ('{"prompt": "\\ud800", "answer": "2"}', "a text in the message is not valid unicode"),
    ],
    ids=["big-integer", "surrogate-in-answer", "surrogate-in-prompt"],
)
def test_a_value_that_cannot_be_sent_to_a_rollout_is_refused_at_reading(tmp_path, tokenizer, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "1", "answer": 1}\n' + line)
    with pytest.raises(DataError, match=f"data.train row 2: .*{message}.*; write the value as text"):
        load(str(file), tokenizer)


def test_a_parquet_column_that_cannot_be_sent_is_named(tmp_path, tokenizer):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"prompt": ["1"], "day": [date(2026, 1, 1)]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="data.train row 1: .*datetime.date at day cannot travel"):
        load(str(tmp_path / "a.parquet"), tokenizer)


def test_parquet_gives_the_same_samples_as_jsonl(tmp_path, tokenizer):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, other = load(write(tmp_path / "a.jsonl", *rows), tokenizer), load(str(tmp_path / "a.parquet"), tokenizer)
    assert [s["extra_env_info"] for s in one.samples] == [s["extra_env_info"] for s in other.samples]


def test_generated_prompts_are_reproducible(tokenizer):
    reference = "reasoning-gym://basic_arithmetic?size=4&seed=3"
    first, second = (read_rows(reference, field="data.train") for _ in range(2))
    assert first == second and len(first) == 4 and {"prompt", "answer", "metadata"} <= set(first[0])
    assert read_rows("reasoning-gym://basic_arithmetic?size=4&seed=4", field="data.train") != first


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("size=0", "size of .* must be a positive integer, got 0"),
        ("size=true", "size of .* must be a positive integer, got True"),
        ("size=", "size of .* must be a positive integer, got ''"),
        ("size=2&seed=x", "seed of .* must be an integer, got 'x'"),
        ("size=2&seed=1.5", "seed of .* must be an integer, got 1.5"),
    ],
)
def test_numbers_of_a_generated_set_are_checked_before_anything_is_made(query, message):
    with pytest.raises(ConfigError, match=f"data.train: {message}"):
        read_rows(f"reasoning-gym://chain_sum?{query}", field="data.train")


def test_ids_equal_those_of_transformers(model_folder, tokenizer):
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
    )
    text = "12 + 30 = <user>"
    assert tokenizer(text)["input_ids"] == other(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == other.decode(other(text)["input_ids"])
    assert tokenizer.eos_token_id == other.eos_token_id and tokenizer.pad_token_id == other.pad_token_id


@pytest.mark.parametrize(
    "template",
    [
        CHAT,
        "{% if tools is not none %}tools{% endif %}{% if documents is none %}none{% endif %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% if loop.first %}!{% endif %}{% endgeneration %}\n{% endfor %}",
        "{{ messages | tojson }}{{ messages | tojson(true) }}{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ eos_token }}{{ m.role }}{% endfor %}",
        "{{ strftime_now('%Y') }}{% if messages | length > 1 %}{{ strftime_now is defined }}{% endif %}",
    ],
    ids=["chat", "tools", "generation", "json", "break", "date"],
)
def test_templates_render_as_in_transformers(model_folder, tokenizer, template):
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
    )
    messages = [{"role": "user", "content": "1 \u00e9"}, {"role": "assistant", "content": "2"}]
    wanted = other.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, template=template, add_generation_prompt=True) == wanted


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_cannot_render_is_a_configuration_error(tokenizer, template, cause):
    with pytest.raises(ConfigError, match=f"chat template must render the prompt, got: .*{cause}"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}], template=template)


def test_a_tokenizer_without_eos_is_refused(model_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="must name an eos_token"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 1


def test_of_templates_by_name_the_default_one_is_taken(model_folder):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    config = json.dumps({"eos_token": "<eos>", "chat_template": named}).encode()
    tokenizer = Tokenizer.from_files(read_files(model_folder) | {"tokenizer_config.json": config})
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}]) == "1"


def test_a_template_file_that_is_no_text_is_a_configuration_error(model_folder):
    with pytest.raises(ConfigError, match="chat_template.jinja of .* must be UTF-8"):
        Tokenizer.from_files(read_files(model_folder) | {"chat_template.jinja": b"\xff"})


def test_a_damaged_tokenizer_is_a_configuration_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.* of .* must be"):
        Tokenizer.from_folder(tmp_path)
