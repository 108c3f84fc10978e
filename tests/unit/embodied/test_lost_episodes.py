"""Simulators that fail in a collection: what is trained is what a plain loop has of the episodes that were not lost, and nothing else."""

import asyncio
import math

import pytest

from rl_core.actors.trajectories import prepare_rows
from rl_core.batching.trajectories import merge_trajectories
from rl_core.envs.embodied import train_seed
from tests.unit.embodied.simulators import FAULTY_SEEDS, Echo, Faulty
from tests.unit.embodied.test_collection import CHUNK, ENDS, GAMMA, HORIZON, PER_WORKER, World


class PlainLoop:
    """One simulator in a plain loop, which forgets an episode that fails and begins the next one."""

    def __init__(self, number, fault_at):
        self.number, self.step, self.begun, self.fault_at = number, 1, 0, fault_at
        self.begin()

    def begin(self):
        self.seed = train_seed(3 + 7919 * self.step, self.number, self.begun)
        self.env, self.made = Echo(ENDS), 0
        self.obs, _ = self.env.reset(seed=self.seed)
        self.begun += 1

    def collect(self, step):
        """Return a row (observation, actions, rewards with bootstrap, steps made) per decision, None for one of a lost episode."""
        if step != self.step:
            self.step, self.begun = step, 0
        rows, first = [], 0
        for decision in range(HORIZON // CHUNK):
            seen, rewards, done, failed = self.obs, [0.0] * CHUNK, False, False
            actions = [math.sin(float(seen.sum()) + index) for index in range(CHUNK)]
            for index, action in enumerate(actions):
                self.made += 1
                if failed := self.seed % FAULTY_SEEDS == 0 and self.made == self.fault_at:
                    break
                self.obs, rewards[index], terminated, truncated, _ = self.env.step(action)
                if done := terminated or truncated:
                    rewards[-1] += GAMMA * (self.obs[1] / 2 + 1) if truncated else 0.0
                    break
            rows.append((seen, actions, rewards, index + 1))
            if failed:
                rows[first:] = [None] * (len(rows) - first)
            if done or failed:
                self.begin()
                first = decision + 1
        return rows


@pytest.mark.parametrize("fault_at", [1, 2, 3])
@pytest.mark.parametrize(
    ("fault", "vectorization"),
    [*((fault, "sync") for fault in ("raise", "nan", "nan observation", "text", "shape")), ("exit", "process")],
)
def test_a_lost_episode_is_not_trained_and_no_other_row_is_missing(fault, vectorization, fault_at):
    kwargs = {"ends": list(ENDS), "fault": fault, "fault_at": fault_at}
    id = f"{Faulty.__module__}:{Faulty.__name__}"
    world = World(1, 1, 1, id=id, kwargs=kwargs, vectorization=vectorization)
    plain = [PlainLoop(number, fault_at) for number in range(PER_WORKER)]
    cfg, options = world.rollouts[0].cfg, world.rollouts[0].options

    async def main():
        lost = 0
        for step in (1, 2, 3):
            received, stats = await world.collect(step, 1)
            merged = merge_trajectories(received[0])
            trained = prepare_rows(merged, cfg.algorithm, options).batch.loss_mask.view(PER_WORKER, -1).T
            for column, number in enumerate(merged.env_ids.tolist()):
                for decision, row in enumerate(plain[number].collect(step)):
                    at = (decision, column)
                    assert bool(merged.valid[at]) == bool(trained[at]) == (row is not None)
                    if row is not None:
                        seen, actions, rewards, steps = row
                        assert merged.forward_inputs["states"][at].tolist() == seen.tolist()
                        assert merged.actions[at].tolist() == pytest.approx(actions, abs=1e-4)
                        assert merged.rewards[at].tolist() == pytest.approx(rewards, abs=1e-4)
                        assert merged.sub_steps[at] == steps
            lost += stats[0].lost
        assert lost

    asyncio.run(main())
