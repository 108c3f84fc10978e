"""The code in docs/writing-an-estimator.md trains as printed."""

import re
from pathlib import Path

import pytest

DOC = Path(__file__).parents[3] / "docs" / "writing-an-estimator.md"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_printed_functions_train_whatever_the_cut(make_actor, records, mine):
    norms = []
    for tokens in (32, 4096):
        actor = make_actor(
            algorithm__name="mine:best_of_group",
            algorithm__loss={"name": "mine:squared"},
            actor__microBatchTokens=tokens,
        )
        actor.load_batch(records)
        actor.compute_log_probs()
        actor.compute_advantages_and_returns()
        advantages, batch = actor.engine.prepared.advantages, actor.engine.prepared.batch
        assert set(advantages.unique().tolist()) == {0.0, 1.0} and not advantages[~batch.loss_mask].any()
        norms.append(actor.run_training(1)["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0
