"""GRPO in simulators: groups that begin alike, their advantages beside a plain loop, and the filter of their mean returns."""

import statistics

import numpy as np
import pytest
import torch

from rl_core.actors.trajectories import prepare_rows
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.embodied import EmbodiedOptions
from rl_core.api.records import ChunkStepResult, EnvOutput
from rl_core.envs.embodied import EVALUATION, eval_seeds, eval_share, train_seed
from rl_core.envs.vector_worker import EnvWorker
from rl_core.rollouts.embodied import cut_trajectory
from rl_core.rollouts.recorder import TrajectoryRecorder
from tests.unit.embodied.test_collection import PER_WORKER, job
from tests.unit.embodied.workers import workers

GROUP, GROUPS, STEPS, WIDTH = 3, 4, 6, 2


@pytest.fixture
def worker():
    spec = job(2, 1, 1, autoReset=False, chunk=1)
    grouped = {"name": "grpo", "seed": 3, "groupSize": GROUP}
    (_, second) = workers(EnvWorker, "env", 2, spec.model_copy(update={"algorithm": AlgorithmSpec(**grouped)}))
    return second


def test_simulators_of_a_group_begin_from_one_seed_that_each_step_draws_anew(worker):
    begun = []
    for step in (1, 2):
        worker.update_reset_state_ids(step)
        seeds = worker.bootstrap_step(0).obs["states"][:, 0].reshape(-1, GROUP)
        assert (seeds == seeds[:, :1]).all()
        first_group = PER_WORKER // GROUP  # those before are of the first env worker
        expected = [train_seed(3 + 7919 * step, first_group + number, 0) % 1000 for number in range(len(seeds))]
        assert seeds[:, 0].tolist() == expected
        begun += expected
    assert len(set(begun)) == len(begun)


def test_the_episodes_of_a_collection_are_begun_once(worker):
    worker.prefetch_train_bootstrap()
    with pytest.raises(RuntimeError, match="once per rollout epoch, got a second call"):
        worker.prefetch_train_bootstrap()


@pytest.mark.parametrize("episodes", [1, 5, 16])
@pytest.mark.parametrize("base_seed", [0, 3, 2**31 - 1])
def test_evaluation_seeds_are_the_same_for_any_number_of_env_workers_and_none_of_training(base_seed, episodes):
    expected = sorted(eval_seeds(base_seed, 0, 1, episodes))
    assert len(set(expected)) == episodes
    for count in (1, 2, 3, 4):
        parts = [eval_seeds(base_seed, rank, count, eval_share(episodes, rank, count)) for rank in range(count)]
        assert sorted(seed for part in parts for seed in part) == expected
    assert max(train_seed(base_seed, group, episode) for group in range(50) for episode in range(50)) < EVALUATION
    assert min(expected) >= EVALUATION and max(expected) < 2**31


def recorded(rng):
    """Return a trajectory without auto-reset, and of each simulator its return, its steps, and whether its episode was lost."""
    count = GROUP * GROUPS
    recorder = TrajectoryRecorder(sender=0, stage=0, auto_reset=False)
    none = torch.zeros(count, 1, dtype=torch.bool)
    recorder.observe(EnvOutput(obs={}, dones=none, terminations=none, truncations=none), None)
    total, made, resting, was_lost = [0.0] * count, [0] * count, [False] * count, [False] * count
    for _ in range(STEPS):
        recorder.decide(
            ChunkStepResult(
                actions=torch.zeros(count, WIDTH),
                prev_logprobs=torch.zeros(count, WIDTH, 1),
                prev_values=None,
                forward_inputs={"states": torch.zeros(count, 1)},
            )
        )
        rewards, steps = torch.zeros(count, WIDTH), torch.zeros(count, dtype=torch.int64)
        dones, lost = torch.zeros(count, WIDTH, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
        for row in range(count):
            if was_lost[row]:  # another simulator plays on; nothing of it counts
                rewards[row], steps[row] = 5.0, WIDTH
            elif resting[row]:
                dones[row, -1] = True
            elif rng.random() < 0.05:
                was_lost[row] = lost[row] = dones[row, -1] = True
            else:
                steps[row] = rng.integers(1, WIDTH + 1)
                resting[row] = bool(steps[row] < WIDTH or rng.random() < 0.2)
                dones[row, steps[row] - 1] = resting[row]
                rewards[row, : steps[row]] = torch.tensor(rng.integers(-8, 9, int(steps[row])) / 4).float()
                total[row] += float(rewards[row].sum())
                made[row] += int(steps[row])
        recorder.observe(
            EnvOutput(obs={}, dones=dones, terminations=dones, truncations=dones, sub_steps=steps, lost=lost), rewards
        )
    return recorder.finish(), total, made, was_lost


@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
@pytest.mark.parametrize("seed", range(10))
def test_advantages_masks_and_filter_are_those_of_a_plain_loop(seed, bounds):
    trajectory, total, made, lost = recorded(np.random.default_rng(seed))
    algorithm = AlgorithmSpec.model_validate({"name": "grpo", "groupSize": GROUP})
    options = EmbodiedOptions(id="x", chunk=WIDTH, auto_reset=False, log_prob_level="action", reward_filter=bounds)
    prepared = prepare_rows(trajectory, algorithm, options)
    mask = prepared.batch.loss_mask.reshape(-1, STEPS, WIDTH)
    advantages = prepared.advantages.reshape(-1, STEPS, WIDTH)
    for begin in range(0, len(total), GROUP):
        rows = range(begin, begin + GROUP)
        scores = [total[row] for row in rows if not lost[row]]
        mean = statistics.mean(scores) if scores else 0.0
        passes = bounds is None or bounds[0] <= mean <= bounds[1]
        for row in rows:
            trained = passes and not lost[row]
            assert int(mask[row].sum()) == (made[row] if trained else 0)
            if trained and len(scores) > 1:
                expected = (total[row] - mean) / (statistics.stdev(scores) + 1e-6)
                assert advantages[row][mask[row]].tolist() == pytest.approx([expected] * made[row], abs=1e-4)


def test_the_bounds_of_the_filter_are_inclusive():
    trajectory, total, _, lost = recorded(np.random.default_rng(1))
    groups = [[total[row] for row in range(begin, begin + GROUP) if not lost[row]] for begin in range(0, 12, GROUP)]
    mean = torch.tensor(groups[0]).sum().div(len(groups[0])).item()
    options = {"id": "x", "chunk": WIDTH, "autoReset": False}
    algorithm = AlgorithmSpec.model_validate({"name": "grpo", "groupSize": GROUP})
    for bounds, kept in (((mean, mean), True), ((mean + 1e-4, 1e9), False)):
        given = EmbodiedOptions.model_validate(options | {"rewardFilter": bounds})
        assert bool(prepare_rows(trajectory, algorithm, given).batch.loss_mask[: GROUP * STEPS].any()) == kept


@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
@pytest.mark.parametrize("algorithm", [{"name": "grpo", "groupSize": GROUP}, {"name": "gae", "critic": {}}])
def test_a_data_rank_without_simulators_has_rows_of_the_same_form_as_the_others(algorithm, bounds):
    """The ranks exchange the columns and inputs of their rows, so none may lack one."""
    full, *_ = recorded(np.random.default_rng(2))
    empty = cut_trajectory(full, 2 * len(full.env_ids) // GROUP, group=GROUP)[-1]
    options = EmbodiedOptions(id="x", chunk=WIDTH, auto_reset=False, log_prob_level="action", reward_filter=bounds)
    spec = AlgorithmSpec.model_validate(algorithm)
    two = [prepare_rows(one, spec, options, reduce=torch.clone) for one in (full, empty)]
    assert [len(one.batch) for one in two] == [len(full.env_ids) * STEPS, 0]
    with_rows, without = ({name: column.dtype for name, column in one.columns().present().items()} for one in two)
    assert with_rows == without
    assert two[0].inputs.keys() == two[1].inputs.keys()
