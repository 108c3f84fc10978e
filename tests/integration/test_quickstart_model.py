"""examples/arithmetic/prepare.py: what it makes is complete or not there, its accuracy is what greedy decoding does, it teaches.

The GRPO run over it is in tests/e2e; its accuracies over seeds in benchmarks/quickstart.py.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "arithmetic" / "prepare.py"
OPTIONS = {"seed": 1, "quick": True, "unspoiled": False}


@pytest.fixture
def script():
    """The script as a module of its own: tests may change its settings."""
    spec = importlib.util.spec_from_file_location("arithmetic_prepare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Maker:
    """Stands in for `make`: writes the parts and counts; `cut` ends it after the first part."""

    def __init__(self) -> None:
        self.calls = 0
        self.cut = False

    def __call__(self, folder: Path, **options) -> dict:
        self.calls += 1
        (folder / "model").mkdir()
        if self.cut:
            raise KeyboardInterrupt
        (folder / "data").mkdir()
        (folder / "model" / "seed").write_text(str(options["seed"]))
        return {"accuracy": 0.5}


@pytest.fixture
def maker(script, monkeypatch):
    made = Maker()
    monkeypatch.setattr(script, "make", made)
    return made


def test_a_second_run_does_nothing(script, maker, tmp_path):
    first = script.prepare(tmp_path / "new" / "folder", **OPTIONS)
    assert script.prepare(tmp_path / "new" / "folder", **OPTIONS) == first == {**OPTIONS, "accuracy": 0.5}
    assert maker.calls == 1


def test_other_options_make_it_anew(script, maker, tmp_path):
    script.prepare(tmp_path, **OPTIONS)
    script.prepare(tmp_path, **OPTIONS | {"seed": 2})
    assert (tmp_path / "model" / "seed").read_text() == "2"
    assert json.loads((tmp_path / "prepared.json").read_text())["seed"] == 2


def test_a_run_that_was_cut_off_leaves_what_was_there_and_nothing_of_its_own(script, maker, tmp_path):
    script.prepare(tmp_path, **OPTIONS)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    maker.cut = True
    with pytest.raises(KeyboardInterrupt):
        script.prepare(tmp_path, **OPTIONS | {"seed": 2})
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert json.loads((tmp_path / "prepared.json").read_text())["seed"] == 1


@pytest.mark.parametrize("lost", ["model", "data", "prepared.json"])
def test_what_was_lost_in_part_is_made_anew(script, maker, tmp_path, lost):
    script.prepare(tmp_path, **OPTIONS)
    (tmp_path / lost).rename(tmp_path / "elsewhere")
    script.prepare(tmp_path, **OPTIONS)
    assert maker.calls == 2
    assert (tmp_path / lost).exists()


def test_a_run_that_another_one_overtook_keeps_the_others(script, maker, monkeypatch, tmp_path):
    def slow(folder: Path, **options) -> dict:
        monkeypatch.setattr(script, "make", maker)
        script.prepare(tmp_path, **options)
        return maker(folder, **options) | {"accuracy": 0.1}

    monkeypatch.setattr(script, "make", slow)
    assert script.prepare(tmp_path, **OPTIONS)["accuracy"] == 0.5


def test_accuracy_is_what_greedy_decoding_gets_right(script, tmp_path):
    tokenizer = script.make_tokenizer(tmp_path)
    model = script.make_model(tokenizer.get_vocab_size(), 0, quick=True).eval()
    pairs, _ = script.split_problems(0, 200)
    rows = script.encode_rows(tokenizer, pairs[:40], script.right)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        script.supervised_step(model, [optimizer], rows)
        greedy = script.answer_chances(model, rows)[1]
        if 10 <= greedy.sum() <= 30:
            break
    prompts = rows[:, : script.PROMPT]
    with torch.no_grad():
        output = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    texts = [tokenizer.decode(row[script.PROMPT :].tolist()) for row in output]
    expected = [text == str(a + b) for text, (a, b) in zip(texts, pairs[:40], strict=True)]
    assert greedy.tolist() == expected
    assert 0 < sum(expected) < 40


def test_the_chance_of_an_answer_is_the_product_of_its_tokens(script, tmp_path):
    tokenizer = script.make_tokenizer(tmp_path)
    model = script.make_model(tokenizer.get_vocab_size(), 0, quick=True).eval()
    rows = script.encode_rows(tokenizer, [(12, 34), (58, 67)], script.right)
    chances, _ = script.answer_chances(model, rows)
    for row, chance in zip(rows, chances, strict=True):
        product = 1.0
        for end in range(script.PROMPT, int((row != 0).sum())):
            with torch.no_grad():
                product *= model(input_ids=row[None, :end]).logits[0, -1].softmax(dim=-1)[row[end]].item()
        assert chance.item() == pytest.approx(product, rel=1e-3)


def test_sloppy_notes_add_every_column_without_a_carry(script):
    for a, b in [(a, b) for a in range(10, 100) for b in range(10, 100)]:
        columns = [(x + y) % 10 for x, y in zip(divmod(a, 10), divmod(b, 10), strict=True)]
        assert script.sloppy(a, b) == columns[0] * 10 + columns[1]


def test_teaching_that_does_not_reach_its_goal_says_so(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "TEACH_LIMIT", 2)
    tokenizer = script.make_tokenizer(tmp_path)
    model = script.make_model(tokenizer.get_vocab_size(), 0, quick=True)
    rows = script.encode_rows(tokenizer, [(12, 34), (58, 67)], script.right)
    with pytest.raises(SystemExit, match=r"after 2 steps, got 0\.\d+ with seed 7; take another --seed"):
        script.teach(model, rows, rows, seed=7)
