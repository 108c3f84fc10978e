"""A policy that acts in simulators, in whole runs: a lost env worker and a resume change nothing of what is trained."""

import json

from tests.e2e.harness import Run

STEPS = 8
SPEC = {
    "program": "embodied",
    "model": {"path": "policy"},
    "data": {"train": "none"},
    "algorithm": {"name": "gae", "critic": {"gamma": 0.99, "lam": 0.95}, "whiten": True, "steps": STEPS},
    "actor": {"optimizer": {"learningRate": 1.0e-3}},
    "rollout": {"replicas": 1},
    "env": {
        "type": "gymnasium",
        "replicas": 2,
        "options": {
            "id": "CartPole-v1",
            "kwargs": {"max_episode_steps": 40},
            "numEnvs": 4,
            "horizon": 48,
            "autoReset": False,
            "vectorization": "sync",
            "evalEpisodes": 3,
        },
    },
    "validation": {"everySteps": STEPS},
    "trackers": [],
}


def begin(folder, every_steps, *, program="embodied", **algorithm):
    folder.mkdir()
    (folder / "policy").mkdir()
    (folder / "policy/config.json").write_text(
        json.dumps({"policy": "mlp", "arguments": {"observation_size": 4, "num_actions": 2, "hidden": [16]}})
    )
    spec = SPEC | {
        "program": program,
        "algorithm": SPEC["algorithm"] | algorithm,
        "checkpoint": {"everySteps": every_steps, "everySeconds": None},
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "poles"}, "spec": spec}
    return Run(folder, job)


def history(run):
    names = (
        "step",
        "env/return",
        "env/steps_total",
        "env/num_trajectories",
        "train/loss",
        "train/grad_norm",
        "val/return",
    )
    return [[line.get(name) for name in names] for line in run.lines("metrics.jsonl")]


def test_a_killed_env_worker_and_a_killed_actor_change_no_number_of_the_run(tmp_path):
    calm, disturbed = begin(tmp_path / "calm", 100), begin(tmp_path / "disturbed", 2)
    try:
        assert calm.run() == 0, calm.text + calm.logs()
        disturbed.start()
        disturbed.at_step(2)
        disturbed.kill(role="env", index=1)
        disturbed.at_step(5)
        disturbed.kill(role="actor")
        assert disturbed.wait() == 0, disturbed.text + disturbed.logs()
        status = disturbed.status()
        assert status["epoch"] == 1 and status["failures"]["env/lost"] >= 1
        expected = history(calm)
        assert [line[0] for line in expected] == list(range(STEPS + 1))
        assert history(disturbed) == expected
        assert all(line[3] > 0 for line in expected[1:])
    finally:
        for run in (calm, disturbed):
            run.end()


def test_collections_ahead_of_training_are_one_version_old_and_survive_the_loss_of_a_rollout(tmp_path):
    run = begin(tmp_path / "ahead", 100, program="embodied_async", maxStaleness=1, steps=3 * STEPS)
    try:
        run.start()
        run.at_step(2)
        run.kill(role="rollout")
        assert run.wait() == 0, run.text + run.logs()
        lines = run.lines("metrics.jsonl")[1:]
        assert [line["step"] for line in lines] == list(range(1, 3 * STEPS + 1))
        ages = [line["train/staleness_max"] for line in lines]
        # The first step collects at once, and so does one whose collection was lost.
        assert ages[0] == 0 and set(ages[1:]) <= {0, 1} and ages.count(1) >= STEPS
        steps = [line["env/steps_total"] for line in lines]
        assert steps == sorted(set(steps))
    finally:
        run.end()
