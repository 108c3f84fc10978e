"""The columns of a step's rows are declared: nothing else gets in, and each has its type."""

import pytest
import torch

from rl_core.actors.rows import COLUMN_DTYPES, FLOATS, INTEGERS, Columns

IDS = torch.zeros(2, 3, dtype=torch.int64)
MASK = torch.ones(2, 3, dtype=torch.bool)


def test_a_column_that_is_not_declared_is_an_error():
    with pytest.raises(TypeError, match="sharpness"):
        Columns(input_ids=IDS, loss_mask=MASK, sharpness=torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("advantages", torch.zeros(2, 4)),
        ("values", torch.zeros(2, 3, dtype=torch.float64)),
        ("loss_mask", IDS),
        ("returns", torch.zeros(2, 3, dtype=torch.bfloat16)),
    ],
)
def test_a_column_of_another_shape_or_type_is_named(name, column):
    with pytest.raises(ValueError, match=f"column {name} must be .* got"):
        Columns(**{"input_ids": IDS, "loss_mask": MASK, name: column})


def test_a_column_without_use_is_absent_and_stays_so():
    columns = Columns(input_ids=IDS, loss_mask=MASK, advantages=torch.ones(2, 3))
    assert list(columns.present()) == ["input_ids", "loss_mask", "advantages"]
    narrow = columns.each(lambda column: column[:, :2])
    assert narrow.weights is None and narrow.advantages.shape == (2, 2)
    assert set(COLUMN_DTYPES) == set(INTEGERS) | set(FLOATS) >= {"values", "returns"}
