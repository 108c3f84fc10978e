"""Bad jobs, each with what the API server and pydantic say of it. Used by tests/unit/api and tests/cluster/control_plane.

Each row: the part of the spec that is bad, the field, the message, and whether pydantic says the same words (SAME: CEL rules, whose words are
those of the pydantic rule) or its own (OWN: types, bounds, enums and required fields, where both speak for themselves).
"""

import copy

from tests.cluster.bad_checkpoints import CHECKPOINTS
from tests.cluster.bad_distillation import DISTILLATION
from tests.cluster.bad_environments import ENVIRONMENTS
from tests.cluster.bad_failure_policies import FAILURE_POLICIES
from tests.cluster.bad_groups import GROUPS
from tests.cluster.bad_placements import OWN, PLACEMENTS, SAME
from tests.cluster.bad_pod_fields import POD_FIELDS
from tests.cluster.bad_weights import WEIGHTS

GOOD = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "good"},
    "spec": {"model": {"path": "/models/tiny"}, "data": {"train": "/data/train.jsonl"}},
}

CASES = (
    PLACEMENTS
    | CHECKPOINTS
    | FAILURE_POLICIES
    | POD_FIELDS
    | WEIGHTS
    | GROUPS
    | DISTILLATION
    | ENVIRONMENTS
    | {
        # spec, field, message, whether pydantic says the same words
        "group-of-one": (
            {"algorithm": {"groupSize": 1}},
            "spec.algorithm.groupSize",
            "groupSize must be at least 2 for the group-relative advantage grpo, got 1; raise groupSize or use reinforce_plus_plus",
            SAME,
        ),
        "prompts-not-divisible": (
            {"algorithm": {"promptsPerStep": 3}, "actor": {"processesPerPod": 2}},
            "spec.algorithm.promptsPerStep",
            "algorithm.promptsPerStep must be divisible by the actor's data-parallel size 2, got 3; change promptsPerStep or actor.replicas",
            SAME,
        ),
        "default-prompts-not-divisible": (
            {"actor": {"replicas": 3, "gpus": 2}},
            "spec.algorithm.promptsPerStep",
            "algorithm.promptsPerStep must be divisible by the actor's data-parallel size 6, got 32; change promptsPerStep or actor.replicas",
            SAME,
        ),
        "mini-batches-not-divisible": (
            {"algorithm": {"promptsPerStep": 2, "groupSize": 2, "optimizerStepsPerBatch": 3}, "actor": {"gpus": 0}},
            "spec.algorithm.optimizerStepsPerBatch",
            "algorithm.promptsPerStep x groupSize must be divisible by data-parallel size x optimizerStepsPerBatch = 3, got 4; change optimizerStepsPerBatch",
            SAME,
        ),
        "dropout-of-adapters-without-dropout": (
            {"model": {"lora": {"dropout": 0.5}}},
            "spec.model",
            "model.lora.dropout needs actor.dropout true, got 0.5 and false; set it or remove the dropout",
            SAME,
        ),
        "model-cut-without-megatron": (
            {"actor": {"replicas": 2, "parallel": {"tensor": 2}}},
            "spec.actor.parallel",
            "parallel needs backend megatron, got fsdp2; choose it or remove parallel",
            SAME,
        ),
        "rows-cut-over-processes": (
            {"actor": {"backend": "megatron", "replicas": 2, "parallel": {"context": 2}}},
            "spec.actor.parallel.context",
            "context must be 1, got 2: megatron-core cuts rows only with Transformer Engine, which is not there; use tensor and sequence",
            SAME,
        ),
        "experts-cut-over-processes": (
            {"actor": {"backend": "megatron", "replicas": 2, "parallel": {"expert": 2}}},
            "spec.actor.parallel.expert",
            "expert must be 1, got 2: no model that megatron takes here has experts; fsdp2 shards them",
            SAME,
        ),
        "model-cut-over-other-than-the-pods-accelerators": (
            {"rollout": {"engine": "sglang", "gpus": 4, "parallel": {"tensor": 2}}},
            "spec.rollout.parallel",
            "parallel.tensor must be gpus with engine sglang and 1 else, got 2 with engine sglang and gpus 4; change gpus",
            SAME,
        ),
        "model-cut-by-an-engine-that-cannot": (
            {"rollout": {"gpus": 2, "parallel": {"tensor": 2}}},
            "spec.rollout.parallel",
            "parallel.tensor must be gpus with engine sglang and 1 else, got 2 with engine hf and gpus 2; change gpus",
            SAME,
        ),
        "batches-by-group-without-its-own-engine": (
            {"rollout": {"engine": "sglang", "batching": "perGroup"}},
            "spec.rollout.engine",
            "batching perGroup and compile need engine hf, got sglang; choose it or remove them",
            SAME,
        ),
        "whole-moments-without-megatron": (
            {"actor": {"optimizer": {"distributed": False}}},
            "spec.actor.optimizer",
            "optimizer.distributed false needs backend megatron, got fsdp2; choose it or remove distributed",
            SAME,
        ),
        "processes-not-divisible": (
            {"actor": {"backend": "megatron", "replicas": 3, "parallel": {"tensor": 2, "pipeline": 2}}},
            "spec.actor.parallel",
            "replicas x processesPerPod must be divisible by parallel.tensor x pipeline = 4, got 3; change replicas",
            SAME,
        ),
        "copies-of-one-process": (
            {"actor": {"replicas": 2, "parallel": {"replicate": 2}}},
            "spec.actor.parallel",
            "parallel.replicate needs an FSDP backend and processes that it divides, more than it, got fsdp2 with 2; change one",
            SAME,
        ),
        "copies-with-megatron": (
            {"actor": {"backend": "megatron", "replicas": 4, "parallel": {"replicate": 2}}},
            "spec.actor.parallel",
            "parallel.replicate needs an FSDP backend and processes that it divides, more than it, got megatron with 4; change one",
            SAME,
        ),
        "more-minimum-than-rollouts": (
            {"rollout": {"replicas": 1, "minReplicas": 2}},
            "spec.rollout.minReplicas",
            "minReplicas must not exceed replicas 1, got 2; lower minReplicas or raise replicas",
            SAME,
        ),
        "default-minimum-above-no-rollouts": (
            {"rollout": {"minReplicas": 4}},
            "spec.rollout.minReplicas",
            "minReplicas must not exceed replicas 1, got 4; lower minReplicas or raise replicas",
            SAME,
        ),
        "maximum-below-rollouts": (
            {"rollout": {"replicas": 4, "maxReplicas": 2}},
            "spec.rollout.maxReplicas",
            "maxReplicas must not be below replicas 4, got 2; raise maxReplicas",
            SAME,
        ),
        "autoscaling-below-what-is-there": (
            {"rollout": {"replicas": 4, "autoscale": {"max": 2}}},
            "spec.rollout.autoscale",
            "autoscale needs minReplicas <= min <= replicas <= max <= maxReplicas, got min 1, max 2 beside replicas 4; change one",
            SAME,
        ),
        "truncated-sampling": (
            {"rollout": {"sampling": {"topK": 5}}},
            "spec.rollout.sampling",
            'rollout.sampling biases the policy ratio by ["topK"]; remove it or set algorithm.allowTruncatedSampling and recomputeLogProbs',
            SAME,
        ),
        "nucleus-sampling": (
            {"rollout": {"sampling": {"topP": 0.5}}},
            "spec.rollout.sampling",
            'rollout.sampling biases the policy ratio by ["topP"]; remove it or set algorithm.allowTruncatedSampling and recomputeLogProbs',
            SAME,
        ),
        "penalties-of-tokens": (
            {
                "rollout": {
                    "sampling": {
                        "minP": 0.1,
                        "presencePenalty": 1.0,
                        "frequencyPenalty": 0.5,
                        "repetitionPenalty": 1.1,
                        "logitBias": {"5": -100.0},
                    }
                }
            },
            "spec.rollout.sampling",
            'rollout.sampling biases the policy ratio by ["minP", "presencePenalty", "frequencyPenalty", "repetitionPenalty", "logitBias"]; '
            "remove it or set algorithm.allowTruncatedSampling and recomputeLogProbs",
            SAME,
        ),
        "decay-of-a-constant-rate": (
            {"actor": {"optimizer": {"schedule": {"decayRatio": 0.2}}}},
            "spec.actor.optimizer.schedule.decayRatio",
            "decayRatio needs style wsd, got constant; choose it or remove decayRatio",
            SAME,
        ),
        "bias-of-a-word": (
            {"rollout": {"sampling": {"logitBias": {"the": 1.0}}}},
            "spec.rollout.sampling.logitBias",
            'logitBias must have token ids as keys, got ["the"]; correct them',
            SAME,
        ),
        "completion-longer-than-the-row": (
            {"rollout": {"maxSequenceLength": 32}},
            "spec.rollout.sampling",
            "rollout.sampling.maxNewTokens must be below rollout.maxSequenceLength 32, got 64; lower maxNewTokens",
            SAME,
        ),
        "group-larger-than-an-engine-batch": (
            {"rollout": {"batching": "perGroup", "maxBatch": 4}, "algorithm": {"groupSize": 5}},
            "spec.rollout.maxBatch",
            "rollout.maxBatch must hold the 5 rows of algorithm.groupSize with batching perGroup, got 4; raise maxBatch",
            SAME,
        ),
        "validation-group-larger-than-an-engine-batch": (
            {
                "rollout": {"batching": "perGroup"},
                "validation": {"samplesPerPrompt": 129, "temperature": 1.0},
            },
            "spec.rollout.maxBatch",
            "rollout.maxBatch must hold the 129 rows of validation.samplesPerPrompt with batching perGroup, got 128; raise maxBatch",
            SAME,
        ),
        "micro-batch-shorter-than-a-row": (
            {"rollout": {"maxSequenceLength": 512}, "actor": {"microBatchTokens": 256}},
            "spec.actor",
            "actor.microBatchTokens must hold the longest row of rollout.maxSequenceLength 512 tokens, got 256; raise it",
            SAME,
        ),
        "shaping-of-several-rewards": (
            {
                "algorithm": {
                    "name": "gdpo",
                    "rewardScale": {"sourceMin": 0.0, "sourceMax": 2.0},
                    "overlong": {"buffer": 4},
                }
            },
            "spec.algorithm.name",
            '["rewardScale", "overlong.buffer"] needs one reward per row, got name gdpo, which takes several as they are; remove it',
            SAME,
        ),
        "bound-of-another-loss": (
            {"algorithm": {"loss": {"behaviorWeightMax": 2.0}}},
            "spec.algorithm.loss.behaviorWeightMax",
            "behaviorWeightMax is honoured by decoupled_ppo only, got loss ppo_clip; remove it or choose decoupled_ppo",
            SAME,
        ),
        "critic-of-nobody": (
            {"algorithm": {"critic": {}}},
            "spec.algorithm.critic",
            "critic needs name gae, got grpo; choose it or remove critic",
            SAME,
        ),
        "critic-settings-of-nobody": (
            {"actor": {"criticWarmupSteps": 2, "optimizer": {"valueLearningRate": 0.1}}},
            "spec.actor",
            '["actor.optimizer.valueLearningRate", "actor.criticWarmupSteps"] needs algorithm.name gae, got grpo; choose it or remove the field',
            SAME,
        ),
        "importance-without-recompute": (
            {"algorithm": {"importance": {}}},
            "spec.algorithm.recomputeLogProbs",
            '["importance"] needs recomputeLogProbs: true, got false; set it or remove the field',
            SAME,
        ),
        "importance-under-truncation": (
            {"algorithm": {"importance": {}, "allowTruncatedSampling": True, "recomputeLogProbs": True}},
            "spec.algorithm.importance",
            "importance weights are wrong under truncated sampling; remove importance or allowTruncatedSampling",
            SAME,
        ),
        "importance-bounds-crossed": (
            {"algorithm": {"importance": {"mode": "icepop", "high": 0.25}, "recomputeLogProbs": True}},
            "spec.algorithm.importance.low",
            "low must be at most high, got 0.5 and 0.25 (mode icepop); lower low or raise high",
            SAME,
        ),
        "dynamic-sampling-of-single-completions": (
            {"algorithm": {"name": "raw", "groupSize": 1, "dynamicSampling": {"enabled": True}}},
            "spec.algorithm.groupSize",
            "dynamicSampling needs groupSize of at least 2, as one reward cannot differ, got 1; raise groupSize or disable it",
            SAME,
        ),
        "ratio-bound-without-ratio": (
            {"algorithm": {"loss": {"name": "reinforce"}, "maxPolicyKl": 0.1}},
            "spec.algorithm.loss.name",
            '["maxPolicyKl"] needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip',
            SAME,
        ),
        "blow-up-of-a-kl-without-ratio": (
            {
                "algorithm": {"loss": {"name": "reinforce"}},
                "failurePolicy": {"klBlowUp": {"above": 1.0, "action": "FailJob"}},
            },
            "spec.failurePolicy.klBlowUp",
            "failurePolicy.klBlowUp needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip",
            SAME,
        ),
        "kl-in-rewards-of-a-sequence": (
            {"algorithm": {"name": "grpo", "rewardKlCoefficient": 0.1}},
            "spec.algorithm.rewardKlCoefficient",
            "rewardKlCoefficient needs rewards per token, got grpo; use loss.klCoefficient or reinforce_plus_plus",
            SAME,
        ),
        "kl-in-rewards-of-a-users-function": (
            {"algorithm": {"name": "reinforce_plus_plus_mine:f", "rewardKlCoefficient": 0.1}},
            "spec.algorithm.rewardKlCoefficient",
            "rewardKlCoefficient needs rewards per token, got reinforce_plus_plus_mine:f; use loss.klCoefficient or reinforce_plus_plus",
            SAME,
        ),
        "kl-twice": (
            {"algorithm": {"name": "reinforce_plus_plus", "rewardKlCoefficient": 0.1, "loss": {"klCoefficient": 0.2}}},
            "spec.algorithm.rewardKlCoefficient",
            "rewardKlCoefficient must be 0 beside loss.klCoefficient, which counts the same KL, got 0.1 and 0.2; remove one",
            SAME,
        ),
        "whitened-twice": (
            {"algorithm": {"name": "reinforce_plus_plus", "whiten": True}},
            "spec.algorithm.whiten",
            "whiten must be false for reinforce_plus_plus, which already whitens, got true; remove it",
            SAME,
        ),
        "dual-clip-of-another-loss": (
            {"algorithm": {"loss": {"name": "cispo", "dualClip": 3.5}}},
            "spec.algorithm.loss.dualClip",
            "dualClip is honoured by ppo_clip only, got loss cispo; remove dualClip or choose ppo_clip",
            SAME,
        ),
        "deviation-bound-of-disabled-sampling": (
            {"algorithm": {"dynamicSampling": {"minStd": 0.25}}},
            "spec.algorithm.dynamicSampling.minStd",
            "minStd needs enabled: true, got minStd 0.25 without it; set enabled or remove minStd",
            SAME,
        ),
        "baseline-of-unfiltered-completions": (
            {"algorithm": {"overlong": {"keepInBaseline": True}}},
            "spec.algorithm.overlong.keepInBaseline",
            "keepInBaseline needs filter: true, got filter false; set filter or remove keepInBaseline",
            SAME,
        ),
        "penalty-without-a-buffer": (
            {"algorithm": {"overlong": {"penalty": 0.5}}},
            "spec.algorithm.overlong.penalty",
            "penalty needs buffer, got penalty 0.5 without one; set buffer or remove penalty",
            SAME,
        ),
        "penalty-cap-without-a-buffer": (
            {"algorithm": {"overlong": {"penaltyCap": 0.5}}},
            "spec.algorithm.overlong.penaltyCap",
            "penaltyCap needs buffer, got penaltyCap 0.5 without one; set buffer or remove penaltyCap",
            SAME,
        ),
        "reward-scale-upside-down": (
            {"algorithm": {"rewardScale": {"sourceMin": 1.5, "sourceMax": 0.5}}},
            "spec.algorithm.rewardScale.sourceMax",
            "sourceMax must be greater than sourceMin, got 1.5 and 0.5; swap or widen them",
            SAME,
        ),
        "two-warm-ups": (
            {"actor": {"optimizer": {"schedule": {"warmupSteps": 1, "warmupRatio": 0.1}}}},
            "spec.actor.optimizer.schedule",
            "give warmupSteps or warmupRatio, not both; remove one",
            SAME,
        ),
        "two-floors": (
            {"actor": {"optimizer": {"schedule": {"minLearningRate": 0, "minLearningRateRatio": 0.1}}}},
            "spec.actor.optimizer.schedule",
            "give minLearningRate or minLearningRateRatio, not both; remove one",
            SAME,
        ),
        "floor-above-the-peak": (
            {"actor": {"optimizer": {"learningRate": 0.25, "schedule": {"minLearningRate": 0.5}}}},
            "spec.actor.optimizer.schedule.minLearningRate",
            "schedule.minLearningRate must not exceed learningRate 0.25, got 0.5; lower it",
            SAME,
        ),
        "reward-without-its-type": (
            {"env": {"type": "math", "reward": "my:score"}},
            "spec.env.reward",
            "reward must be given exactly when type is `reward`, got type math and reward my:score; set both or neither",
            SAME,
        ),
        "type-reward-without-a-reward": (
            {"env": {"type": "reward"}},
            "spec.env.reward",
            "reward must be given exactly when type is `reward`, got type reward and reward null; set both or neither",
            SAME,
        ),
        "greedy-samples": (
            {"validation": {"samplesPerPrompt": 4}},
            "spec.validation.samplesPerPrompt",
            "samplesPerPrompt must be 1 with greedy validation, got 4; set temperature above 0",
            SAME,
        ),
        "deadlines-out-of-order": (
            {"runtime": {"deadlines": {"heartbeat": 2.5, "suspect": 1.5, "lost": 15.5}}},
            "spec.runtime.deadlines",
            "heartbeat < suspect < lost must hold, got 2.5, 1.5, 15.5; raise the later ones",
            SAME,
        ),
        "no-model": ({"model": None}, "spec.model", "Required value", OWN),
        "no-path": ({"model": {"path": None}}, "spec.model.path", "Required value", OWN),
        "no-training-data": (
            {"data": {"train": None}},
            "spec.data",
            "data must have exactly one of train, sets, got 0; give one",
            SAME,
        ),
        "negative-steps": (
            {"algorithm": {"steps": -1}},
            "spec.algorithm.steps",
            "Invalid value: -1: spec.algorithm.steps in body should be greater than or equal to 1",
            OWN,
        ),
        "steps-in-words": (
            {"algorithm": {"steps": "many"}},
            "spec.algorithm.steps",
            'Invalid value: "string": spec.algorithm.steps in body must be of type integer: "string"',
            OWN,
        ),
        "straggler-on-policy": (
            {"algorithm": {"stragglerSeconds": 9}},
            "spec.algorithm.stragglerSeconds",
            "stragglerSeconds needs maxStaleness above 0, got 0; remove it",
            SAME,
        ),
        "interrupted-on-policy": (
            {"weights": {"onUpdate": "abort_resume"}},
            "spec.weights.onUpdate",
            "weights.onUpdate must be wait on policy, got abort_resume and maxStaleness 0; raise algorithm.maxStaleness or remove it",
            SAME,
        ),
        "kept-keys-without-a-correction": (
            {"algorithm": {"maxStaleness": 1}, "weights": {"onUpdate": "keep_kv"}},
            "spec.weights.onUpdate",
            "weights.onUpdate keep_kv needs algorithm.importance or loss decoupled_ppo, got neither; set one or take abort_resume",
            SAME,
        ),
        "corrected-twice": (
            {"algorithm": {"loss": {"name": "decoupled_ppo"}, "recomputeLogProbs": True, "importance": {}}},
            "spec.algorithm.importance",
            "importance must be left out with decoupled_ppo, which corrects by itself; remove one",
            SAME,
        ),
        "negative-staleness": (
            {"algorithm": {"maxStaleness": -1}},
            "spec.algorithm.maxStaleness",
            "Invalid value: -1: spec.algorithm.maxStaleness in body should be greater than or equal to 0",
            OWN,
        ),
        "unknown-estimator": (
            {"algorithm": {"name": "ppo2"}},
            "spec.algorithm.name",
            "must be one of grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gae, gdpo, raw, distill, reinforce++, ppo or a function of yours as "
            "module:function, got ppo2; correct the name",
            SAME,
        ),
        "cold-sampling": (
            {"rollout": {"sampling": {"temperature": 0}}},
            "spec.rollout.sampling.temperature",
            "Invalid value: 0: spec.rollout.sampling.temperature in body should be greater than 0",
            OWN,
        ),
        "too-many-rollouts": (
            {"rollout": {"replicas": 5000}},
            "spec.rollout.replicas",
            "Invalid value: 5000: spec.rollout.replicas in body should be less than or equal to 1024",
            OWN,
        ),
        "root-user": (
            {"actor": {"securityContext": {"runAsUser": 0}}},
            "spec.actor.securityContext.runAsUser",
            "Invalid value: 0: spec.actor.securityContext.runAsUser in body should be greater than or equal to 1",
            OWN,
        ),
        "unconfined": (
            {"env": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}},
            "spec.env.securityContext.seccompProfile.type",
            'Unsupported value: "Unconfined": supported values: "RuntimeDefault"',
            OWN,
        ),
        "no-way-to-stop": (
            {"actor": {"terminationGracePeriodSeconds": 0}},
            "spec.actor.terminationGracePeriodSeconds",
            "Invalid value: 0: spec.actor.terminationGracePeriodSeconds in body should be greater than or equal to 1",
            OWN,
        ),
        "variable-that-is-a-number": (
            {"actor": {"env": {"THREADS": 4}}},
            "spec.actor.env.THREADS",
            'Invalid value: "integer": spec.actor.env.THREADS in body must be of type string: "integer"',
            OWN,
        ),
    }
)


def merged(base: dict, change: dict) -> dict:
    """Return `base` with `change` put into it; None takes a field out."""
    whole = copy.deepcopy(base)
    for key, value in change.items():
        if value is None:
            whole.pop(key, None)
        else:
            whole[key] = merged(whole.get(key, {}), value) if isinstance(value, dict) else value
    return whole
