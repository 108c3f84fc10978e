"""Bad jobs of tests/cluster/bad_jobs.py: types of environments and their turns."""

from tests.cluster.bad_placements import SAME

ENVIRONMENTS = {
    "misspelled-environment": (
        {"env": {"type": "mathh"}},
        "spec.env.type",
        "env.type must be one of agent, environment_factory, gymnasium, gymnasium_text, math, nemo_gym, reasoning_gym, reward, reward_model or module:Class"
        ", got mathh; correct it, or list in extensions the module that registers it",
        SAME,
    ),
    "turns-of-a-reward-function": (
        {"env": {"type": "reward", "reward": "mine:score", "maxTurns": 4}},
        "spec.env.maxTurns",
        "maxTurns must be 1 with type reward, which ends an episode with its first completion, got 4; remove it, or name a module:Class",
        SAME,
    ),
    "turns-of-the-default-environment": (
        {"env": {"maxTurns": 2}},
        "spec.env.maxTurns",
        "maxTurns must be 1 with type math, which ends an episode with its first completion, got 2; remove it, or name a module:Class",
        SAME,
    ),
}
