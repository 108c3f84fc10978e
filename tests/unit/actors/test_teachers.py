"""What teachers answer gets to its rows; a lost teacher's rows go to another one, and an answer that does not fit is refused."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_core.actors.inference import InferenceGroup
from rl_core.actors.teachers import Teachers
from rl_core.api.distillation import DistillationSpec
from rl_core.api.errors import DataError, InfrastructureError, WorkerLost
from rl_core.batching.collate import collate_groups
from rl_core.transports import frames
from tests import actor_samples

RECORDS = [actor_samples.make_record(group) for group in range(3)]
BATCH = collate_groups(RECORDS, pad_token_id=0, max_length=64)


def log_probs(rows, temperature):
    return [(-row / temperature).astype(np.float32) for row in rows]


def top_log_probs(rows, temperature, top_k):
    candidates = [(row[:, None] + np.arange(top_k)).astype(np.int32) for row in rows]
    return [
        (values, ids, (-ids / temperature).astype(np.float32))
        for values, ids in zip(log_probs(rows, temperature), candidates, strict=True)
    ]


class Asking:
    """The side of an actor that teachers use: members by group, and calls whose answers travel as messages do."""

    group_name = "actor"

    def __init__(self, members, answers=None):
        self.answers = {"log_probs": log_probs, "top_log_probs": top_log_probs} | (answers or {})
        self.lost, self.calls = set(), []
        state = SimpleNamespace(constructed=True)
        self.views = {
            group: [SimpleNamespace(name=f"{group}:{i}", rank=i, address=f"{group}:{i}", state=state) for i in range(n)]
            for group, n in members.items()
        }

    def waiting(self, what, group):
        return nullcontext()

    def members(self, group):
        return [view for view in self.views.get(group, []) if view.address not in self.lost]

    def peer(self, address):
        async def call(method, rows, *options, timeout):
            self.calls.append((address, len(rows)))
            if address == "teacher:0" and len(self.members("teacher")) > 1:
                self.lost.add(address)
                raise WorkerLost(f"{address} was killed")
            return frames.decode(frames.encode(self.answers[method](rows, *options)), copy=True)

        return SimpleNamespace(call=call)


def ask(worker, records=RECORDS, *, seconds=5.0, **spec):
    spec = DistillationSpec.model_validate({"teacher": "teacher", **spec})
    batch = collate_groups(records, pad_token_id=0, max_length=64)
    return Teachers(worker, spec, temperature=2.0, seconds=seconds)(batch, records)


def test_each_row_gets_what_the_teacher_says_of_it_where_it_trains():
    found = ask(Asking({"teacher": 1}))
    expected = torch.where(BATCH.loss_mask, -BATCH.input_ids / 2.0, 0.0)
    assert torch.equal(found.log_probs, expected) and found.candidates is found.candidate_log_probs is None
    found = ask(Asking({"teacher": 1}), topK=3)
    assert torch.equal(found.log_probs, expected)
    candidates = BATCH.input_ids[..., None] + torch.arange(3)
    assert found.candidates.dtype == torch.int64 and found.candidate_log_probs.dtype == torch.float32
    assert torch.equal(found.candidates, torch.where(BATCH.loss_mask[..., None], candidates, 0))
    assert torch.equal(found.candidate_log_probs, -found.candidates / 2.0)


def test_the_rows_of_a_lost_teacher_go_to_another_one():
    worker = Asking({"teacher": 2})
    assert torch.equal(ask(worker).log_probs, ask(Asking({"teacher": 1})).log_probs)
    assert worker.calls == [("teacher:0", len(BATCH)), ("teacher:1", len(BATCH))]


def test_a_column_chooses_the_teacher_of_a_prompt():
    records = [actor_samples.make_record(group) for group in range(3)]
    for record, subject in zip(records, ("law", "math", "law"), strict=True):
        record.extra_env_info = {"subject": subject}
    worker = Asking({"math": 1, "law": 1})
    spec = {"teacher": None, "teachers": {"math": "math", "law": "law"}, "column": "subject"}
    found = ask(worker, records, **spec)
    assert worker.calls == [("law:0", 8), ("math:0", 4)]
    assert torch.equal(found.log_probs, ask(Asking({"teacher": 1})).log_probs)
    records[1].extra_env_info = {"subject": "chess"}
    with pytest.raises(DataError, match="a teacher for each value of the column subject, got 'chess' in prompt"):
        ask(worker, records, **spec)


def test_an_answer_of_another_shape_and_no_answer_are_errors():
    short = {"log_probs": lambda rows, temperature: [row[1:].astype(np.float32) for row in rows]}
    with pytest.raises(
        DataError, match=r"teacher teacher must return values of shape \(\d+,\) for a row of \d+ tokens"
    ):
        ask(Asking({"teacher": 1}, short))
    with pytest.raises(InfrastructureError, match="must answer within 0 s"):
        ask(Asking({}), seconds=0.0)


def test_old_log_probabilities_are_those_of_the_inference_group_at_the_version_of_the_trainer():
    asked = []

    def scores(rows, temperature, version, seconds):
        asked.append((version, seconds))
        return log_probs(rows, temperature)

    worker = Asking({"inference": 2}, {"log_probs": scores})
    group = InferenceGroup(worker, "inference", temperature=2.0, seconds=5.0)
    assert torch.equal(group(BATCH, 4), torch.where(BATCH.loss_mask, -BATCH.input_ids / 2.0, 0.0))
    assert asked == [(4, 4.5)]


def test_an_inference_group_that_is_gone_or_has_another_version_leaves_the_work_to_the_trainer():
    def newer(rows, temperature, version, seconds):
        raise InfrastructureError("inference:0 must serve version 4 of the weights, got 5")

    for worker in (Asking({}), Asking({"inference": 1}, {"log_probs": newer})):
        assert InferenceGroup(worker, "inference", temperature=1.0, seconds=0.0)(BATCH, 4) is None


def test_a_rank_without_rows_gets_columns_of_as_many_candidates():
    found = ask(Asking({}), records=[], topK=3)
    assert found.candidates.shape[0] == 0 and found.candidates.shape[2:] == found.candidate_log_probs.shape[2:] == (3,)
