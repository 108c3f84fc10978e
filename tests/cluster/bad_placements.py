"""Jobs whose placement block is bad, as rows of `bad_jobs`."""

SAME, OWN = True, False
"""Whether pydantic says the words of the API server, or its own."""

PLACEMENTS = {
    "unequal-halves": (
        {"placement": {"mode": "colocated"}, "rollout": {"replicas": 2, "gpus": 1}},
        "spec.rollout.gpus",
        "rollout.gpus must equal actor.gpus with placement.mode colocated, which puts both on the same devices, got 1 beside 0; write the same number",
        SAME,
    ),
    "turns-beside-generation": (
        {"placement": {"mode": "colocated"}, "algorithm": {"maxStaleness": 1}},
        "spec.algorithm.maxStaleness",
        "algorithm.maxStaleness must be 0 with placement.mode colocated, where trainer and rollouts take turns, got 1; write maxStaleness: 0 or placement.mode: disaggregated",
        SAME,
    ),
    "autoscaling-of-numbered-rollouts": (
        {
            "placement": {"componentPlacement": {"actor": 0, "rollout": "1-2"}},
            "rollout": {"replicas": 2, "autoscale": {"max": 4}},
        },
        "spec.rollout.autoscale",
        "rollout.autoscale needs rollouts that placement neither pairs nor numbers, got mode disaggregated; remove it or the placement",
        SAME,
    ),
    "hybrid-with-an-actor-pod-that-has-no-rollout": (
        {"placement": {"mode": "hybrid"}, "actor": {"replicas": 2}},
        "spec.rollout.replicas",
        "rollout.replicas must be actor.replicas with placement.mode colocated, and no fewer with hybrid, got hybrid with 1 beside 2; change rollout.replicas",
        SAME,
    ),
    "device-memory-mapped-from-another-device": (
        {"weights": {"transport": "ipc"}},
        "spec.weights.transport",
        "weights.transport must be auto unless roles take turns on GPUs, got ipc; on one host auto takes shared memory",
        SAME,
    ),
    "unknown-placement": (
        {"placement": {"mode": "scattered"}},
        "spec.placement.mode",
        'Unsupported value: "scattered": supported values: "disaggregated", "colocated", "hybrid"',
        OWN,
    ),
    "placed-role-without-processes": (
        {"placement": {"componentPlacement": {"actor": "0", "rollout": "1", "critic": "2"}}},
        "spec.placement.componentPlacement",
        'placement.componentPlacement must name groups of the job, got ["critic"]; correct them or declare the groups',
        SAME,
    ),
    "placement-that-is-no-map": (
        {"placement": {"componentPlacement": {"actor": "0..3"}}},
        "spec.placement.componentPlacement[actor]",
        "must be ranks[:processes], joined by commas, such as 0-3 or 4-7:0-1, got 0..3; write it so, in quotes",
        SAME,
    ),
}
