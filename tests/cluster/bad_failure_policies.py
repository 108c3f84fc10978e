"""Jobs whose failure policy is bad, as rows of `bad_jobs`."""

from tests.cluster.bad_placements import OWN, SAME

FAILURE_POLICIES = {
    "rule-that-matches-nothing": (
        {"failurePolicy": {"rules": [{"action": "FailJob"}]}},
        "spec.failurePolicy.rules[0]",
        "a rule must have one of exitCodes, podConditions, reasons, messagePattern, got 0; give one, or remove the rule",
        SAME,
    ),
    "restart-of-one-actor-pod": (
        {"failurePolicy": {"rules": [{"action": "RestartPod", "roles": ["actor"], "exitCodes": [3]}]}},
        "spec.failurePolicy.rules[0].action",
        'action RestartPod is for roles rollout and env only, as the actor restarts as a gang, got roles ["actor"]; name roles: [rollout, env] or use RestartJob',
        SAME,
    ),
    "ignoring-an-end-of-any-role": (
        {"failurePolicy": {"rules": [{"action": "Ignore", "reasons": ["OOMKilled"]}]}},
        "spec.failurePolicy.rules[0].action",
        "action Ignore is for roles rollout and env only, as the actor restarts as a gang, got roles []; name roles: [rollout, env] or use RestartJob",
        SAME,
    ),
    "unknown-action": (
        {"failurePolicy": {"stall": {"action": "Reboot"}}},
        "spec.failurePolicy.stall.action",
        'Unsupported value: "Reboot": supported values: "RestartRole", "RestartJob", "Pause", "FailJob"',
        OWN,
    ),
    "forty-rules": (
        {"failurePolicy": {"rules": [{"action": "FailJob", "exitCodes": [9]}] * 40}},
        "spec.failurePolicy.rules",
        "Too many: 40: must have at most 32 items",
        OWN,
    ),
}
