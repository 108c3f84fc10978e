"""The batch of an embodied step is that of its simulators: what divides it, and that it is cut between groups of simulators only."""

import itertools

import pytest

from rl_core.api.embodied import check_job as check
from rl_core.api.embodied import embodied_options
from rl_core.api.errors import ConfigError
from rl_core.plan.routing import data_rank_of, routes, trajectory_parts
from rl_core.rollouts.embodied import cut_trajectory
from rl_core.runner.changes import merge
from tests.trajectory_samples import make_trajectory
from tests.unit.embodied.test_refused_fields import job

OPTIONS = {"id": "CartPole-v1", "numEnvs": 6, "horizon": 8, "chunk": 2}


@pytest.mark.parametrize("program", ["embodied", "embodied_async"])
@pytest.mark.parametrize("minibatches", [3, 6, 24])
def test_optimizer_steps_divide_decisions_and_not_prompts(program, minibatches):
    algorithm = {"name": "gae", "critic": {}, "optimizerStepsPerBatch": minibatches}
    algorithm |= {"maxStaleness": 1} if program == "embodied_async" else {}
    check(job(program=program, algorithm=algorithm, **{"env.options": OPTIONS}))


def test_the_batch_has_the_decisions_of_all_env_workers():
    algorithm = {"name": "gae", "critic": {}, "optimizerStepsPerBatch": 16}
    check(job(algorithm=algorithm, **{"env.options": OPTIONS, "env.replicas": 2}))
    with pytest.raises(
        ConfigError, match="the 24 decisions of a step must be divisible by .* = 16; change env.options"
    ):
        check(job(algorithm=algorithm, **{"env.options": OPTIONS}))
    with pytest.raises(ConfigError, match="the 24 decisions of a step must be divisible by .* = 5; change env.options"):
        check(job(**{"env.options": OPTIONS, "actor.processesPerPod": 5}))


def test_prompts_per_step_is_refused():
    with pytest.raises(ConfigError, match="algorithm.promptsPerStep must be left out with program embodied"):
        embodied_options(job(**{"algorithm.promptsPerStep": 24}))


def test_a_running_job_takes_no_number_of_workers_with_which_its_batch_cannot_be_divided():
    spec = job(**{"env.options": OPTIONS, "rollout.maxReplicas": 64})
    wanted = spec.model_dump(mode="json", by_alias=True)
    wanted["rollout"]["replicas"] = 6
    assert merge(spec, wanted).rollout.replicas == 6
    wanted["rollout"]["replicas"] = 7
    with pytest.raises(ValueError, match="rollout.replicas must not exceed the 6 simulators of a stage, got 7"):
        merge(spec, wanted)


@pytest.mark.parametrize(("group", "stages"), itertools.product((1, 2, 3), (1, 2)))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_simulator_is_trained_by_one_data_rank_together_with_its_group(group, stages, ranks):
    for envs, rollouts in itertools.product((1, 2, 3), (1, 2, 3, 4, 5)):
        grpo = {"name": "grpo", "groupSize": group}
        options = OPTIONS | {"numEnvs": 6 * stages, "horizon": 24, "stages": stages, "autoReset": group == 1}
        spec = job(
            algorithm=grpo if group > 1 else {"name": "gae", "critic": {}},
            rollout={"replicas": rollouts},
            actor={"processesPerPod": ranks},
            **{"env.options": options, "env.replicas": envs},
        )
        if envs * 6 // group < rollouts:
            with pytest.raises(ConfigError, match=r"rollout\.replicas must not exceed"):
                check(spec)
            continue
        check(spec)
        parts = trajectory_parts(rollouts * stages, ranks)
        held = [[] for _ in range(ranks)]
        for (sender, part), rows in cuts(envs, rollouts, stages, parts, group):
            assert len(rows) % group == 0 and all(first % group == 0 for first in rows[:1])
            assert all(later == row + 1 for row, later in itertools.pairwise(rows))
            held[data_rank_of(sender, part, senders=rollouts * stages, actors=ranks)] += rows
        assert sorted(itertools.chain(*held)) == sorted(list(range(6 * envs)) * stages)


def cuts(envs, rollouts, stages, parts, group):
    """Yield ((sender, part), simulators of a stage) for each part of the trajectories of a collection."""
    for rollout, stage in itertools.product(range(rollouts), range(stages)):
        sizes = [
            sum(
                route.size
                for route in routes(6, env_workers=envs, rollouts=rollouts, group=group)
                if route.rollout == at
            )
            for at in range(rollouts)
        ]
        begin = sum(sizes[:rollout])
        trajectory = make_trajectory(list(range(begin, begin + sizes[rollout])), 1)
        for piece in cut_trajectory(trajectory, parts, group=group):
            yield (rollout * stages + stage, piece.part), piece.env_ids.tolist()
