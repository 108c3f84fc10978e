"""Jobs with bad `groups` or a bad `program`; rows as in bad_jobs."""

from rl_core.api.groups import RESERVED_NAMES
from tests.cluster.bad_placements import SAME

JUDGE = {"name": "judge", "worker": "judges:Judge"}
CRITIC = {**JUDGE, "lifecycle": "gang", "callers": ["actor"]}
IN_GROUP = {"name": "gae", "critic": {"group": "judge"}}
LABEL = "must be a DNS-1123 label of at most 15 characters (a-z, 0-9, -; a letter first), got"

GROUPS = {
    "group-of-a-taken-name": (
        {"groups": [{**JUDGE, "name": "env"}]},
        "spec.groups[0].name",
        f"name must not be one of {', '.join(RESERVED_NAMES)}, got env; rename the group",
        SAME,
    ),
    "groups-of-one-name": (
        {"groups": [JUDGE, {**JUDGE, "worker": "judges:Other"}]},
        "spec.groups",
        "groups must have unique names, got judge more than once; change one",
        SAME,
    ),
    "group-that-pods-cannot-carry": (
        {"groups": [{**JUDGE, "name": "Judge"}]},
        "spec.groups[0].name",
        f"{LABEL} Judge; rename it",
        SAME,
    ),
    "group-without-a-class": (
        {"groups": [{**JUDGE, "worker": "judges"}]},
        "spec.groups[0].worker",
        "must be module:Class, got judges; name a class that can be imported",
        SAME,
    ),
    "group-with-unknown-callers": (
        {"groups": [{**JUDGE, "callers": ["rollout", "jury"]}]},
        "spec.groups",
        'groups must name groups of the job in callers, got [["jury"]]; correct it',
        SAME,
    ),
    "group-whose-devices-do-not-divide": (
        {"groups": [{**JUDGE, "gpus": 3, "processesPerPod": 2}]},
        "spec.groups[0].gpus",
        "gpus must be a multiple of processesPerPod 2, got 3; change one of them",
        SAME,
    ),
    "gang-that-pulls-weights": (
        {"groups": [{**JUDGE, "weights": "pulls", "lifecycle": "gang"}]},
        "spec.groups[0].weights",
        "weights pulls needs lifecycle elastic, got gang; remove one",
        SAME,
    ),
    "inference-by-a-group-without-weights": (
        {"groups": [JUDGE], "algorithm": {"recomputeLogProbs": True, "inference": "judge"}},
        "spec.algorithm.inference",
        "algorithm.inference must name a group of spec.groups with weights: pulls, got judge; declare it",
        SAME,
    ),
    "inference-that-nobody-asks": (
        {"groups": [{**JUDGE, "weights": "pulls"}], "algorithm": {"inference": "judge"}},
        "spec.algorithm.recomputeLogProbs",
        '["inference"] needs recomputeLogProbs: true, got false; set it or remove the field',
        SAME,
    ),
    "critic-in-a-group-that-is-not-declared": (
        {"groups": [], "algorithm": IN_GROUP},
        "spec.algorithm.critic.group",
        "algorithm.critic.group must name a group of spec.groups, a gang of one process with actor in callers, got judge; declare it",
        SAME,
    ),
    "critic-that-is-replaced-alone": (
        {"groups": [{**JUDGE, "callers": ["actor"]}], "algorithm": IN_GROUP},
        "spec.algorithm.critic.group",
        "algorithm.critic.group must name a group of spec.groups, a gang of one process with actor in callers, got judge; declare it",
        SAME,
    ),
    "critic-of-two-processes": (
        {"groups": [{**CRITIC, "processesPerPod": 2}], "algorithm": IN_GROUP},
        "spec.algorithm.critic.group",
        "algorithm.critic.group must name a group of spec.groups, a gang of one process with actor in callers, got judge; declare it",
        SAME,
    ),
    "critic-whom-the-actor-cannot-call": (
        {"groups": [{**JUDGE, "lifecycle": "gang"}], "algorithm": IN_GROUP},
        "spec.algorithm.critic.group",
        "algorithm.critic.group must name a group of spec.groups, a gang of one process with actor in callers, got judge; declare it",
        SAME,
    ),
    "critic-of-simulators-in-a-group": (
        {"groups": [CRITIC], "algorithm": IN_GROUP, "program": "embodied"},
        "spec.algorithm.critic.group",
        "algorithm.critic.group needs a program of text, got judge with a program of simulators; remove group",
        SAME,
    ),
    "critic-in-a-group-with-a-warm-up": (
        {"groups": [CRITIC], "algorithm": IN_GROUP, "actor": {"criticWarmupSteps": 3}},
        "spec.actor.criticWarmupSteps",
        "actor.criticWarmupSteps must be 0 with algorithm.critic.group, got 3; remove one of them",
        SAME,
    ),
    "adapters-beside-a-group-that-pulls": (
        {"groups": [{**JUDGE, "weights": "pulls"}], "model": {"path": "/models/m", "lora": {"rank": 4}}},
        "spec.groups",
        "groups cannot pull the weights of a model with model.lora; remove one of them",
        SAME,
    ),
    "program-that-is-none": (
        {"program": "mine"},
        "spec.program",
        "must be one of reasoning, asynchronous, embodied, embodied_async or module:Class, got mine; correct it",
        SAME,
    ),
    "program-beside-another-staleness": (
        {"program": "asynchronous"},
        "spec.program",
        "program asynchronous does not fit algorithm.maxStaleness 0: asynchronous needs more than 0, reasoning 0; remove program",
        SAME,
    ),
    "no-rollouts": (
        {"rollout": {"replicas": 0, "minReplicas": 0}},
        "spec.program",
        "rollout.replicas and env.replicas must be at least 1 for the program of rljob, got 0 and 1; raise them or name a program",
        SAME,
    ),
}
