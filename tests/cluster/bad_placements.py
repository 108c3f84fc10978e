"""Jobs whose placement block is bad, as rows of `bad_jobs`."""

SAME, OWN = True, False
"""Whether pydantic says the words of the API server, or its own."""

PLACEMENTS = {
    "shared-placement": (
        {"placement": {"mode": "colocated"}},
        "spec.placement.mode",
        "mode must be disaggregated, as no backend shares devices between roles yet, got colocated; write disaggregated and give each role its own gpus",
        SAME,
    ),
    "mixed-placement": (
        {"placement": {"mode": "hybrid"}},
        "spec.placement.mode",
        "mode must be disaggregated, as no backend shares devices between roles yet, got hybrid; write disaggregated and give each role its own gpus",
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
        'componentPlacement must place actor, rollout, env, got ["critic"]; remove them',
        SAME,
    ),
    "placement-that-is-no-map": (
        {"placement": {"componentPlacement": {"actor": "0..3"}}},
        "spec.placement.componentPlacement[actor]",
        "must be ranks[:processes], joined by commas, such as 0-3 or 4-7:0-1, got 0..3; write it so, in quotes",
        SAME,
    ),
}
