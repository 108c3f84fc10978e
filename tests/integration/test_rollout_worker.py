"""A rollout worker over real parts in one process: publisher, receiver, channels, RPC; only the env worker is a small RPC server."""

import json
import math
import subprocess
import sys

import pytest
import torch

from rl_core.api.errors import GenerationUnavailable
from tests import ROOT
from tests.integration.rollout_world import CONFIG, World, random_state, records, wait_for
from tests.weight_samples import StateSource


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def test_nothing_is_leased_before_a_version_is_proven(world):
    world.start()
    world.put(0)
    assert world.worker.status()["version"] == -1
    assert world.ledger.polls == []
    with pytest.raises(GenerationUnavailable):
        world.on_loop(world.worker.probe([3, 4, 5], 2))
    world.publish(1, seed=1)
    (record,) = records(world, 1)
    assert record.group_id == "train-0" and record.start_version == record.end_version == 1


def test_every_group_arrives_with_the_lease_token_and_versions_of_the_served_weights(world):
    world.start()
    world.publish(1, seed=1)
    world.put(*range(6))
    found = {record.group_id: record for record in records(world, 6)}
    assert sorted(found) == [f"train-{index}" for index in range(6)]
    for index in range(6):
        record = found[f"train-{index}"]
        assert record.lease_token == f"token-{index}" and len(record.completions) == 4
        for completion in record.completions:
            assert completion.policy_versions == (1, 1)
            assert math.isfinite(completion.reward)
            assert completion.message_log[1]["generation_logprobs"].dtype == torch.float32
    assert world.ledger.given_back == []


def test_samples_repeat_by_seed_whatever_shares_the_batch_and_change_with_the_weights(world):
    def tokens(record):
        return [completion.message_log[1]["token_ids"].tolist() for completion in record.completions]

    world.start()
    world.publish(1, seed=1)
    world.put(0)
    (alone,) = records(world, 1)
    world.put(*range(5), again="-again")
    together = {record.group_id: record for record in records(world, 5)}
    assert tokens(alone) == tokens(together["train-0"])
    assert len({tuple(ids) for ids in tokens(alone)}) > 1
    world.publish(2, seed=2)
    world.put(0, version=2)
    (after,) = records(world, 1)
    assert tokens(after) != tokens(alone) and after.completions[0].policy_versions == (2, 2)


def test_a_late_joiner_pulls_the_committed_version_and_serves_it(world):
    world.publisher.publish(5, StateSource(random_state(3)), [], 0)
    answer = world.on_loop(world.worker.join(world.publisher.address))
    assert answer.version == 5 and answer.digest
    world.start()
    world.put(0, version=5)
    (record,) = records(world, 1)
    assert record.completions[0].policy_versions == (5, 5)


def test_the_served_weights_are_the_published_ones(world):
    world.publish(1, seed=9)
    served = dict(world.engine.loop.engine._decoder.weights.named_tensors())
    for name, tensor in random_state(9).items():
        assert served[name].equal(tensor), name


def test_probe_scores_a_continuation_at_the_training_temperature():
    world = World(sampling={"maxNewTokens": 8, "temperature": 0.5})
    try:
        world.publish(1, seed=4)
        answer = world.on_loop(world.worker.probe([3, 4, 5], 4))
        assert answer.version == 1 and 1 <= len(answer.ids) == len(answer.logprobs) <= 4
        again = world.on_loop(world.worker.probe([3, 4, 5], 4))
        assert again == answer
    finally:
        world.close()


def test_a_data_failure_is_given_back_with_its_reason_and_leaves_no_record(world):
    world.env.fail = "RolloutDataFailure"
    world.start()
    world.publish(1, seed=1)
    world.put(0)
    world.put(1, mode="validate")
    wait_for(lambda: len(world.ledger.given_back) == 2)
    for index, (token, reason, message) in enumerate(sorted(world.ledger.given_back)):
        assert (token, reason) == (f"token-{index}", "data") and "told to fail" in message
    assert world.trajectories.stats().depth == world.validation.qsize() == 0


def test_validation_is_scored_apart_from_training(world):
    world.start()
    world.publish(1, seed=1)
    world.put(3, mode="validate")
    answer = world.validation.get(timeout=120)
    assert (answer.group_id, answer.token) == ("validate-3", "token-3")
    assert len(answer.rewards) == len(answer.lengths) == len(answer.truncated) == 1
    assert world.trajectories.stats().depth == 0


def test_an_update_waits_for_groups_in_flight_and_later_prompts_wait_for_it(world):
    import concurrent.futures

    world.start()
    world.publish(1, seed=1)
    world.env.hold = concurrent.futures.Future()
    world.put(0)
    wait_for(lambda: world.env.calls)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(world.publish, 2, 2)
        wait_for(lambda: world.worker.status()["weights"] == "ready")
        world.put(1, version=2)
        assert not publishing.done()
        world.env.hold.set_result(None)
        publishing.result(120)
    first, second = records(world, 2)
    assert (first.group_id, first.end_version) == ("train-0", 1)
    assert (second.group_id, second.start_version) == ("train-1", 2)


def test_a_new_epoch_drops_work_and_serves_nothing_until_weights_are_proven_again(world):
    import concurrent.futures

    world.start()
    world.publish(1, seed=1)
    world.env.hold = concurrent.futures.Future()
    world.put(0)
    wait_for(lambda: world.env.calls)
    world.on_loop(world.worker.on_new_epoch(1))
    world.env.hold.set_result(None)
    assert world.worker.status()["weights"] == "unversioned" and world.worker.status()["groups_in_flight"] == 0
    assert world.trajectories.stats().depth == 0
    wait_for(lambda: world.ledger.given_back)
    assert world.ledger.given_back[0][:2] == ("token-0", "stale")


def test_draining_finishes_what_is_in_flight_and_leases_nothing_more(world):
    world.start()
    world.publish(1, seed=1)
    world.put(0)
    wait_for(lambda: world.worker.status()["groups_in_flight"] or world.trajectories.stats().depth)
    world.on_loop(world.worker.drain())
    world.put(1)
    wait_for(lambda: world.ledger.given_back)  # what the poll of before brings
    assert world.ledger.given_back[0][:2] == ("token-1", "stale") and world.trajectories.stats().depth == 1


def test_groups_wait_for_an_env_worker_to_appear(world):
    world.show_env(False)
    world.start()
    world.publish(1, seed=1)
    world.put(0)
    wait_for(lambda: world.engine.load().queued_rows == 4 and world.engine.loop.idle)
    world.show_env(True)
    (record,) = records(world, 1)
    assert len(record.completions) == 4 and not world.ledger.given_back


def test_batches_per_group_repeat_bit_by_bit_under_any_load():
    world = World(batching="perGroup")
    try:
        world.start()
        world.publish(1, seed=1)
        world.put(0)
        (alone,) = records(world, 1)
        world.put(*range(4), again="-again")
        together = {record.group_id: record for record in records(world, 4)}["train-0"]
        for one, other in zip(alone.completions, together.completions, strict=True):
            assert one.message_log[1]["token_ids"].equal(other.message_log[1]["token_ids"])
            assert one.message_log[1]["generation_logprobs"].equal(other.message_log[1]["generation_logprobs"])
    finally:
        world.close()


def test_a_generation_that_finds_no_memory_fails_its_rows_with_the_reason_and_the_next_one_is_whole():
    """Memory ends where keys and values are placed, where their mask is, and in a step; the group in such a batch is made again, once."""
    command = [sys.executable, "-m", "tests.integration.memory_child", "60", "60", "140", "165"]
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=240, cwd=ROOT).stdout)
    assert len(told["short"]) == 4 and len(told["whole"]) == 3
    for kinds in told["short"]:
        (kind, text), *others = map(json.loads, kinds)
        assert kind == "GenerationUnavailable" and not others
        assert "a generation step failed: RuntimeError" in text and "can't allocate memory" in text
    assert all(kinds == told["whole"][0] and len(kinds) == 1 for kinds in told["whole"])
    assert len(json.loads(told["whole"][0][0])) == 3, "tokens"
    assert told["record"] == ["train-1", 4, 1] and told["given_back"] == [] and told["retried"] == 1


def test_a_rollout_process_never_imports_transformers():
    code = (
        "import sys; from rl_core.rollouts.hf.worker import HFRolloutWorker; from rl_core.rollouts.hf.models import model_from_files; import json, torch;"
        f"model_from_files({{'config.json': json.dumps({CONFIG!r}).encode()}}, dtype=torch.float32);"
        "assert not {'transformers', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
