"""The table of CEL twins: for each `@rule` of rl_core.api the same rule in the same words, checked by the API server.

A rule without an entry here fails the generator; a test sends every rule's breach to a real API server and to pydantic.
"""

from __future__ import annotations

from pydantic.alias_generators import to_camel

from rl_core.api.algorithm import ADVANTAGE_ALIASES, GROUP_RELATIVE, IMPORTANCE_BOUNDS, PER_TOKEN
from rl_core.api.pods import GPU_RESOURCE, OWN_CLAIM, OWNED_ANNOTATIONS, OWNED_LABELS, PROTECTED_ENV
from rl_core.api.volumes import OWN_PREFIX, RESERVED_PATHS, VOLUME_KINDS
from rljob_operator.crd.rules import Twin, literal

RANKS = "($actor.replicas * $actor.processesPerPod)"
ROWS = "($algorithm.promptsPerStep * $algorithm.groupSize)"
PARTS = f"({RANKS} * $algorithm.optimizerStepsPerBatch)"
KNOWN_VOLUME = "has(self.volumes) && self.volumes.exists(v, v.name == m.name)"
VOLUME_NAMES = "has(self.volumes) ? self.volumes.map(v, v.name) : []"
MOUNTS_KNOWN = f"!has(c.volumeMounts) || c.volumeMounts.all(m, {KNOWN_VOLUME})"
NEEDING_RECOMPUTE = (
    "((has(self.importance) ? ['importance'] : []) + (has(self.sequenceErrorThreshold) ? ['sequenceErrorThreshold'] : [])"
    " + ($allowTruncatedSampling ? ['allowTruncatedSampling'] : []))"
)

LOWEST, HIGHEST = (
    f"(has(self.{side}) ? self.{side} : {literal({mode: pair[index] for mode, pair in IMPORTANCE_BOUNDS.items()})}[$mode])"
    for index, side in enumerate(("low", "high"))
)
OF_TOKENS = (
    f"$name in {literal(sorted([*PER_TOKEN, *(a for a, name in ADVANTAGE_ALIASES.items() if name in PER_TOKEN)]))}"
)
RATIO_BOUNDS = "((has(self.maxPolicyRatio) ? ['maxPolicyRatio'] : []) + (has(self.maxPolicyKl) ? ['maxPolicyKl'] : []))"


def _exactly_one(what: str, names: tuple[str, ...]) -> tuple[Twin, ...]:
    aliases = [to_camel(name) for name in names]
    given = f"[{', '.join(f'has(self.{alias})' for alias in aliases)}].filter(given, given).size()"
    return (
        Twin(
            holds=f"{given} == 1",
            refusal=f"{what} must have exactly one of {', '.join(aliases)}, got %d; give one",
            values=(given,),
        ),
    )


def _no_keys(field: str, taken: str, refusal: str) -> tuple[Twin, ...]:
    """Return the twin that refuses keys `k` of the map `field` for which the expression `taken` holds."""
    return (
        Twin(
            holds=f"!has(self.{field}) || !self.{field}.exists(k, {taken})",
            refusal=refusal,
            values=(f"self.{field}.filter(k, {taken})",),
            field=field,
        ),
    )


def _unique(field: str, key: str) -> Twin:
    alone = f"self.{field}.exists_one(other, other.{key} == one.{key})"
    return Twin(
        holds=f"!has(self.{field}) || self.{field}.all(one, {alone})",
        refusal=f"{field} must have unique {key}s, got %s more than once; change one",
        values=(f"self.{field}.filter(one, !{alone})[0].{key}",),
        field=field,
    )


def _no_gpu(field: str) -> Twin:
    return Twin(
        holds=f"!({literal(GPU_RESOURCE)} in ${field})",
        refusal=f"resources.{field} must not name {GPU_RESOURCE}, got %s; set the role's gpus instead",
        values=(f"string(self.{field}[{literal(GPU_RESOURCE)}])",),
        field=field,
    )


PROTECTED_VARIABLES = _no_keys(
    "env",
    f"k.startsWith('RLJOB_') || k in {literal(sorted(PROTECTED_ENV))}",
    "env must not set variables the launcher owns, got %s; remove them",
)

TWINS: dict[str, tuple[Twin, ...]] = {
    "LossSpec._dual_clip_needs_ppo": (
        Twin(
            holds="!has(self.dualClip) || $name == 'ppo_clip' || $name.contains(':')",
            refusal="dualClip is honoured by ppo_clip only, got loss %s; remove dualClip or choose ppo_clip",
            values=("$name",),
            field="dualClip",
        ),
    ),
    "ImportanceSpec._bounds": (
        Twin(
            holds=f"{LOWEST} <= {HIGHEST}",
            refusal="low must be at most high, got %s and %s (mode %s); lower low or raise high",
            values=(LOWEST, HIGHEST, "$mode"),
            field="low",
        ),
    ),
    "DynamicSamplingSpec._bound_is_used": (
        Twin(
            holds="$enabled || $minStd == 0.0",
            refusal="minStd needs enabled: true, got minStd %s without it; set enabled or remove minStd",
            values=("$minStd",),
            field="minStd",
        ),
    ),
    "OverlongSpec._baseline_is_used": (
        Twin(
            holds="$filter || !$keepInBaseline",
            refusal="keepInBaseline needs filter: true, got filter false; set filter or remove keepInBaseline",
            field="keepInBaseline",
        ),
    ),
    "OverlongSpec._penalty_is_used": (
        Twin(
            holds="has(self.buffer) || $penalty == 1.0",
            refusal="penalty needs buffer, got penalty %s without one; set buffer or remove penalty",
            values=("$penalty",),
            field="penalty",
        ),
        Twin(
            holds="has(self.buffer) || !has(self.penaltyCap)",
            refusal="penaltyCap needs buffer, got penaltyCap %s without one; set buffer or remove penaltyCap",
            values=("self.penaltyCap",),
            field="penaltyCap",
        ),
    ),
    "RewardScaleSpec._range": (
        Twin(
            holds="self.sourceMax > self.sourceMin",
            refusal="sourceMax must be greater than sourceMin, got %s and %s; swap or widen them",
            values=("self.sourceMin", "self.sourceMax"),
            field="sourceMax",
        ),
    ),
    "AlgorithmSpec._group_size": (
        Twin(
            holds=f"$groupSize >= 2 || !($name in {literal(sorted(GROUP_RELATIVE))})",
            refusal=(
                "groupSize must be at least 2 for the group-relative advantage %s, got %d"
                "; raise groupSize or use reinforce_plus_plus"
            ),
            values=("$name", "$groupSize"),
            field="groupSize",
        ),
    ),
    "AlgorithmSpec._dynamic_sampling_compares": (
        Twin(
            holds="!$dynamicSampling.enabled || $groupSize >= 2",
            refusal=(
                "dynamicSampling needs groupSize of at least 2, as one reward cannot differ, got 1"
                "; raise groupSize or disable it"
            ),
            field="groupSize",
        ),
    ),
    "AlgorithmSpec._bounds_on_the_ratio": (
        Twin(
            holds=f"$loss.name != 'reinforce' || {RATIO_BOUNDS}.size() == 0",
            refusal="%s needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip",
            values=(RATIO_BOUNDS,),
            field="loss.name",
        ),
    ),
    "AlgorithmSpec._recompute": (
        Twin(
            holds=f"$recomputeLogProbs || {NEEDING_RECOMPUTE}.size() == 0",
            refusal="%s needs recomputeLogProbs: true, got false; set it or remove the field",
            values=(f"{NEEDING_RECOMPUTE}",),
            field="recomputeLogProbs",
        ),
        Twin(
            holds="!($allowTruncatedSampling && has(self.importance))",
            refusal=(
                "importance weights are wrong under truncated sampling; remove importance or allowTruncatedSampling"
            ),
            field="importance",
        ),
    ),
    "AlgorithmSpec._kl_once": (
        Twin(
            holds=f"$rewardKlCoefficient == 0.0 || {OF_TOKENS}",
            refusal="rewardKlCoefficient needs rewards per token, got %s; use loss.klCoefficient or reinforce_plus_plus",
            values=("$name",),
            field="rewardKlCoefficient",
        ),
        Twin(
            holds="$rewardKlCoefficient == 0.0 || $loss.klCoefficient == 0.0",
            refusal="rewardKlCoefficient must be 0 beside loss.klCoefficient, which counts the same KL, got %s and %s; remove one",
            values=("$rewardKlCoefficient", "$loss.klCoefficient"),
            field="rewardKlCoefficient",
        ),
    ),
    "AlgorithmSpec._whiten_once": (
        Twin(
            holds=f"!($whiten && {OF_TOKENS})",
            refusal="whiten must be false for %s, which already whitens, got true; remove it",
            values=("$name",),
            field="whiten",
        ),
    ),
    "ScheduleSpec._one_of": (
        Twin(
            holds="!(has(self.warmupSteps) && has(self.warmupRatio))",
            refusal="give warmupSteps or warmupRatio, not both; remove one",
        ),
        Twin(
            holds="!(has(self.minLearningRate) && has(self.minLearningRateRatio))",
            refusal="give minLearningRate or minLearningRateRatio, not both; remove one",
        ),
    ),
    "OptimizerSpec._floor": (
        Twin(
            holds=(
                "!has(self.schedule)"
                " || !has(self.schedule.minLearningRate) || self.schedule.minLearningRate <= $learningRate"
            ),
            refusal="schedule.minLearningRate must not exceed learningRate %s, got %s; lower it",
            values=("$learningRate", "self.schedule.minLearningRate"),
            field="schedule.minLearningRate",
        ),
    ),
    "RolloutSpec._bounds": (
        Twin(
            holds="$minReplicas <= $replicas",
            refusal="minReplicas must not exceed replicas %d, got %d; lower minReplicas or raise replicas",
            values=("$replicas", "$minReplicas"),
            field="minReplicas",
        ),
        Twin(
            holds="!has(self.maxReplicas) || self.maxReplicas >= $replicas",
            refusal="maxReplicas must not be below replicas %d, got %d; raise maxReplicas",
            values=("$replicas", "self.maxReplicas"),
            field="maxReplicas",
        ),
    ),
    "EnvSpec._reward": (
        Twin(
            holds="($type == 'reward') == has(self.reward)",
            refusal=(
                "reward must be given exactly when type is `reward`, got type %s and reward %s; set both or neither"
            ),
            values=("$type", "has(self.reward) ? self.reward : 'null'"),
            field="reward",
        ),
    ),
    "ValidationSpec._greedy_once": (
        Twin(
            holds="$samplesPerPrompt == 1 || $temperature > 0.0",
            refusal="samplesPerPrompt must be 1 with greedy validation, got %d; set temperature above 0",
            values=("$samplesPerPrompt",),
            field="samplesPerPrompt",
        ),
    ),
    "DeadlinesSpec._order": (
        Twin(
            holds="$heartbeat < $suspect && $suspect < $lost",
            refusal="heartbeat < suspect < lost must hold, got %s, %s, %s; raise the later ones",
            values=("$heartbeat", "$suspect", "$lost"),
        ),
    ),
    "FailureRule._matches_something": (
        Twin(
            holds="$exitCodes.size() + $podConditions.size() + $reasons.size() > 0 || has(self.messagePattern)",
            refusal=(
                "a rule must have one of exitCodes, podConditions, reasons, messagePattern, got 0"
                "; give one, or remove the rule"
            ),
        ),
    ),
    "FailureRule._gang_restarts_whole": (
        Twin(
            holds="!(self.action in ['RestartPod', 'Ignore']) || ($roles.size() > 0 && !('actor' in $roles))",
            refusal=(
                "action %s is for roles rollout and env only, as the actor restarts as a gang, got roles %s"
                "; name roles: [rollout, env] or use RestartJob"
            ),
            values=("self.action", "$roles"),
            field="action",
        ),
    ),
    "ProjectedSource._one_source": _exactly_one("a source of a projected volume", ("config_map", "secret")),
    "Volume._one_kind": _exactly_one("a volume", VOLUME_KINDS),
    "Volume._name_is_free": (
        Twin(
            holds=f"!self.name.startsWith({literal(OWN_PREFIX)})",
            refusal=f"name must not begin with {OWN_PREFIX}, which the operator's own volumes do, got %s; rename it",
            values=("self.name",),
            field="name",
        ),
    ),
    "VolumeMount._path_is_free": (
        Twin(
            holds=f"!self.mountPath.matches({literal(f'^{RESERVED_PATHS}$')})",
            refusal="mountPath must not be in /etc/rljob, /dev, /proc or /sys, got %s; choose another folder",
            values=("self.mountPath",),
            field="mountPath",
        ),
    ),
    "ResourceClaim._name_is_free": (
        Twin(
            holds=f"self.name != {literal(OWN_CLAIM)}",
            refusal=f"name must not be {OWN_CLAIM}, which is the claim of the role's gpus, got %s; rename it",
            values=("self.name",),
            field="name",
        ),
    ),
    "EnvFrom._one_source": _exactly_one("an entry of envFrom", ("config_map_ref", "secret_ref")),
    "ResourceClaim._one_source": _exactly_one(
        "an entry of resourceClaims", ("resource_claim_name", "resource_claim_template_name")
    ),
    "Resources._no_gpus": (_no_gpu("requests"), _no_gpu("limits")),
    "InitContainer._protected": PROTECTED_VARIABLES,
    "PodSpec._protected": PROTECTED_VARIABLES,
    "PodSpec._device_class": (
        Twin(
            holds="!has(self.deviceClass) || $gpuAllocation == 'dra'",
            refusal="deviceClass needs gpuAllocation dra, got %s; set gpuAllocation: dra or remove deviceClass",
            values=("$gpuAllocation",),
            field="deviceClass",
        ),
    ),
    "PodSpec._labels_are_free": _no_keys(
        "labels",
        " || ".join(f"k.startsWith({literal(prefix)})" for prefix in OWNED_LABELS),
        f"labels must not start with {' or '.join(OWNED_LABELS)}, which the operator sets, got %s; rename them",
    ),
    "PodSpec._annotations_are_free": _no_keys(
        "annotations",
        " || ".join(f"k.startsWith({literal(prefix)})" for prefix in OWNED_ANNOTATIONS),
        "annotations must not start with rljob.dev/ or set apparmor or seccomp, which the operator does, got %s; remove them",
    ),
    "PodSpec._names_are_unique": (
        *(_unique(field, "name") for field in ("volumes", "initContainers", "resourceClaims")),
        _unique("volumeMounts", "mountPath"),
    ),
    "PodSpec._mounts_name_volumes": (
        Twin(
            holds=f"!has(self.volumeMounts) || self.volumeMounts.all(m, {KNOWN_VOLUME})",
            refusal="volumeMounts must name a volume of the role, %s, got %s; add it to volumes or correct the name",
            values=(VOLUME_NAMES, f"self.volumeMounts.filter(m, !({KNOWN_VOLUME})).map(m, m.name)"),
            field="volumeMounts",
        ),
        Twin(
            holds=f"!has(self.initContainers) || self.initContainers.all(c, {MOUNTS_KNOWN})",
            refusal="volumeMounts of init containers must name a volume of the role, %s, got others in %s; add it to volumes or correct the name",
            values=(VOLUME_NAMES, f"self.initContainers.filter(c, !({MOUNTS_KNOWN})).map(c, c.name)"),
            field="initContainers",
        ),
    ),
    "RoleSpec._claimed_class": (
        Twin(
            holds="$gpus == 0 || $gpuAllocation != 'dra' || has(self.deviceClass)",
            refusal="gpuAllocation dra needs deviceClass, got gpus %d without one; name a DeviceClass of the cluster",
            values=("$gpus",),
            field="gpuAllocation",
        ),
    ),
    "RLJobSpec._batch_divides": (
        Twin(
            holds=f"{RANKS} < 1 || $algorithm.promptsPerStep % {RANKS} == 0",
            refusal=(
                "algorithm.promptsPerStep must be divisible by the actor's data-parallel size %d, got %d"
                "; change promptsPerStep or actor.replicas"
            ),
            values=(RANKS, "$algorithm.promptsPerStep"),
            field="algorithm.promptsPerStep",
        ),
        Twin(
            holds=f"{PARTS} < 1 || {ROWS} % {PARTS} == 0",
            refusal=(
                "algorithm.promptsPerStep x groupSize must be divisible by data-parallel size x optimizerStepsPerBatch = %d, got %d"
                "; change optimizerStepsPerBatch"
            ),
            values=(PARTS, ROWS),
            field="algorithm.optimizerStepsPerBatch",
        ),
    ),
    "RLJobSpec._kl_is_measured": (
        Twin(
            holds="$algorithm.loss.name != 'reinforce' || !self.?failurePolicy.?klBlowUp.hasValue()",
            refusal="failurePolicy.klBlowUp needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip",
            field="failurePolicy.klBlowUp",
        ),
    ),
    "RLJobSpec._sampling_is_exact": (
        Twin(
            holds=(
                "$algorithm.allowTruncatedSampling"
                " || ($rollout.sampling.topP >= 1.0 && !self.?rollout.?sampling.?topK.hasValue())"
            ),
            refusal=(
                "rollout.sampling.topP and topK bias the policy ratio, got topP %s, topK %s"
                "; remove them or set algorithm.allowTruncatedSampling and recomputeLogProbs"
            ),
            values=(
                "$rollout.sampling.topP",
                "self.?rollout.?sampling.?topK.hasValue() ? string(self.rollout.sampling.topK) : 'null'",
            ),
            field="rollout.sampling",
        ),
    ),
    "RLJobSpec._lengths_fit": (
        Twin(
            holds=(
                "!self.?rollout.?maxSequenceLength.hasValue()"
                " || $rollout.sampling.maxNewTokens < self.rollout.maxSequenceLength"
            ),
            refusal=(
                "rollout.sampling.maxNewTokens must be below rollout.maxSequenceLength %d, got %d; lower maxNewTokens"
            ),
            values=("self.rollout.maxSequenceLength", "$rollout.sampling.maxNewTokens"),
            field="rollout.sampling",
        ),
        Twin(
            holds=(
                "!self.?rollout.?maxSequenceLength.hasValue()"
                " || $actor.microBatchTokens >= self.rollout.maxSequenceLength"
            ),
            refusal=(
                "actor.microBatchTokens must hold the longest row of rollout.maxSequenceLength %d tokens, got %d"
                "; raise it"
            ),
            values=("self.rollout.maxSequenceLength", "$actor.microBatchTokens"),
            field="actor",
        ),
    ),
    "RLJobSpec._groups_fit": tuple(
        Twin(
            holds=f"$rollout.batching != 'perGroup' || $rollout.maxBatch >= ${rows}",
            refusal=f"rollout.maxBatch must hold the %d rows of {rows} with batching perGroup, got %d; raise maxBatch",
            values=(f"${rows}", "$rollout.maxBatch"),
            field="rollout.maxBatch",
        )
        for rows in ("algorithm.groupSize", "validation.samplesPerPrompt")
    ),
}
