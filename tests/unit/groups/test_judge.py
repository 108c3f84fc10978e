"""The judge's scores are what its model writes; an answer without a score is tried again with another seed, and never becomes a reward."""

import asyncio
import re

import pytest

from rl_core.api.errors import ConfigError, DataError, GenerationUnavailable
from rl_core.envs import member_scores
from rl_core.groups.judge import TEMPLATE, Judge, marked_number
from rl_core.rollouts.generation import EngineGenerator
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.sampling import sample_seed
from tests.small_models import save_policy

OWN = """
def digits(answer):
    return sum(map(int, filter(str.isdigit, answer))) or None

def broken(answer):
    raise KeyError("no verdict")

def first_letter(answer):
    return ord(answer[0]) - ord("a") if answer[:1].isalpha() else None

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("judge"), seed=1)


@pytest.fixture
def judge(folder, tmp_path, monkeypatch):
    (tmp_path / "verdicts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(**config):
        given = {"modelPath": str(folder), "maxNewTokens": 8, "template": "{{ prompt }}{{ completion }}="}
        made.append(Judge({**given, **config}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def conversation(text):
    return [{"role": "user", "content": "say "}, {"role": "assistant", "content": text}]


def score(judge, *texts):
    return asyncio.run(judge.score([{"messages": conversation(text), "columns": {}} for text in texts]))


def answers_alone(folder, message, *, attempts, seed=0):
    """Return what the model writes to `message` in each attempt, generated alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = HFEngine(AutoModelForCausalLM.from_pretrained(folder), tokenizer, max_batch=1, max_seq_len=64)
    sampling = {"max_new_tokens": 8, "temperature": 0.7, "stop_strings": ("</score>",)}
    seeds = [sample_seed(seed, message, 0, attempt) for attempt in range(1, attempts + 1)]
    ids = tokenizer(message)["input_ids"]
    return [
        tokenizer.decode(engine.generate([ids], sampling, [seed])[0].ids, skip_special_tokens=True) for seed in seeds
    ]


def test_each_score_is_that_of_the_first_answer_that_has_one(judge, folder):
    """The answers of a batch equal those of each row alone. Rows need different numbers of attempts."""
    texts = [letter * 3 for letter in "abcdefgh"]
    needed = []
    for text, found in zip(
        texts, score(judge(parser="verdicts:first_letter", maximum=25, attempts=4), *texts), strict=True
    ):
        firsts = [answer[:1] for answer in answers_alone(folder, f"say {text}=", attempts=4)]
        usable = [index for index, first in enumerate(firsts) if first.isalpha()]
        needed.append(usable[0] if usable else None)
        assert found == ord(firsts[usable[0]]) - ord("a") if usable else "gave no score in 4 answers" in found["error"]
    assert 0 in needed and any(needed), "some row needs a second answer"


def test_a_judge_explains_a_score_with_the_answer_that_has_it(judge, folder, monkeypatch):
    made = judge(parser="verdicts:first_letter", maximum=25, attempts=4)
    text = next(letter * 3 for letter in "abcdefgh" if isinstance(score(made, letter * 3)[0], float))
    answers = answers_alone(folder, f"say {text}=", attempts=4)
    wanted = next(answer for answer in answers if answer[:1].isalpha())
    monkeypatch.setattr(member_scores, "call_member", lambda group, method, rows: asyncio.run(made.score(rows)))
    environment = member_scores.MemberScoresEnvironment({"group": "judge"})
    returned = environment.step([conversation(text)], [{"answer": "4"}])
    assert float(returned.rewards[0]) == ord(wanted[0]) - ord("a")
    assert returned.metadata == [{"answer": "4", "explanation": wanted}]


def test_a_row_without_a_score_in_any_answer_fails_alone_and_is_counted(judge):
    made = judge(attempts=3)
    assert all(
        "no score in 3 answers, in the last one no score was found: '" in r["error"] for r in score(made, "a", "b")
    )
    assert made.counts == {"answers": 6, "retries": 4, "failures": 2}


@pytest.mark.parametrize(
    ("parser", "more", "rule"),
    [
        ("verdicts:broken", {}, r"the parser raised KeyError: 'no verdict' \(verdicts.py:6 in broken\) for '"),
        ("verdicts:digits", {"minimum": 90, "maximum": 99}, r"(the score is not in \[90, 99\]|no score was found): '"),
    ],
    ids=["parser raises", "outside"],
)
def test_the_failure_says_what_was_wrong_with_the_last_answer(judge, parser, more, rule):
    [result] = score(judge(parser=parser, **more), "a")
    assert re.search(rule, result["error"])


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("good. <score>7</score>", 7.0),
        ("<score> 2.5 </score>", 2.5),
        ("not <score>9</score> but <score>-1</score>", -1.0),
        ("seven <score></score>", None),
        ("<score>7", None),
        ("7", None),
    ],
)
def test_the_default_parser_reads_the_last_number_between_the_markers(answer, number):
    assert marked_number(answer) == number


def test_the_default_template_renders(tmp_path, judge):
    folder = save_policy(tmp_path / "long", max_position_embeddings=512)
    [result] = score(judge(modelPath=str(folder), template=TEMPLATE, attempts=1), "a")
    assert "no score was found" in result["error"]


def test_the_template_sees_conversation_columns_and_bounds(judge, monkeypatch):
    seen = []

    async def generate_row(self, prompt, *, seed):
        seen.append(made._tokenizer.decode(prompt).replace(" ", ""))
        raise GenerationUnavailable("the generation engine was shut down")

    monkeypatch.setattr(EngineGenerator, "generate_row", generate_row)
    made = judge(template="{{ prompt }}+{{ completion }}.{{ columns.answer }},{{ messages|length }}+{{ maximum }}")
    with pytest.raises(GenerationUnavailable):
        asyncio.run(made.score([{"messages": conversation("abc"), "columns": {"answer": "yes"}}]))
    assert seen == ["say+abc.yes,2+10"]
    [result] = asyncio.run(made.score([{"messages": conversation("abc")}]))
    assert "has no attribute 'answer'" in result["error"]


def test_a_row_that_is_too_long_or_no_conversation_is_refused(judge):
    made = judge(maxLength=20)
    [result] = score(made, "a" * 20)
    assert result["error"].startswith("a message to the judge must have 1 to 12 tokens, got 2")
    with pytest.raises(DataError, match="role, content"):
        asyncio.run(made.score([["not a message"]]))


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"template": "{{ prompt"}, r"config.template: must be a Jinja template"),
        ({"parser": "verdicts:none"}, r"config.parser: must exist.*defines broken, digits, first_letter"),
        ({"parser": "verdicts:number"}, r"config.parser: must name a function, got 'verdicts:number', which is a int"),
        ({"temperature": 0}, r"temperature must be above 0 with attempts 3"),
        ({"minimum": 10}, r"minimum must be below maximum, got 10 and 10"),
        ({"maxNewTokens": 64}, r"config.maxNewTokens: must be below the 64 tokens"),
        ({"batchTokens": 64}, r"config.batchTokens: unknown field"),
        ({"modelPath": "/nowhere"}, r"config.modelPath must be a folder with config.json"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(judge, config, rule):
    with pytest.raises(ConfigError, match=rule):
        judge(**config)


def test_calls_after_the_end_fail_as_infrastructure(judge):
    made = judge()
    made.close()
    with pytest.raises(GenerationUnavailable):
        score(made, "a")
