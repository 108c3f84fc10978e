"""The names, units and meanings of all metrics of a step. `rljob metrics` prints them and docs/metrics.md is generated from them.

A name in `<>` stands for one part that differs from run to run, such as a group of processes or a component of the reward. Names that the
functions and programs of a user report are not listed: those of own losses and estimators begin with `train/`.
"""

import difflib
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

MAX_LINE = 140
"""Most characters of a line of the page."""
INTRODUCTION = (
    "Generated from rl_core.observability.metric_list by `make docs`. Each step is one line of `metrics.jsonl`, and the same names are "
    "curves in TensorBoard, W&B, MLflow and `rljob view`. `rljob metrics` prints this list, `rljob metrics NAME` one entry or those that "
    "contain a word, `rljob metrics OUT [NAME]` the last values of a run with their meanings. `<a,b>` stands for any of its parts, "
    "`<spread>` for mean, min, max, median or stddev, and another word in `<>` for a name from the run. What losses and estimators of your "
    "own report is under `train/` too."
)
SPREAD = "spread over the samples of a prompt group, averaged over groups"


class Metric(NamedTuple):
    """One metric, or several whose names have the same form."""

    name: str
    """Name with `<part>` where it varies."""
    unit: str
    meaning: str

    def describes(self, name: str) -> bool:
        """Return whether `name` is this metric."""
        return re.fullmatch("".join(map(_pattern, _PARTS.split(self.name))), name) is not None


def _pattern(part: str) -> str:
    """Return the regular expression of a part of a name: one of several words, anything without a slash, or the text itself."""
    if not part.startswith("<"):
        return re.escape(part)
    choices = part.strip("<>").split(",")
    return f"(?:{'|'.join(map(re.escape, choices))})" if len(choices) > 1 else "[^/]+"


_PARTS = re.compile(r"(<[^>]+>)")

METRICS = (
    Metric("step", "steps", "training step, from 1"),
    Metric(
        "epoch",
        "attempts",
        "attempt of the run, from 0; each restart and each resume adds 1. It is no pass over the data",
    ),
    Metric("policy_version", "versions", "version of the weights after the step"),
    Metric("filtered_reward", "reward", "mean reward of the groups that dynamic sampling kept"),
    Metric(
        "reward/<mean,std,min,max>",
        "reward",
        "rewards of the prompt groups that the step trains on, as the environment gave them",
    ),
    Metric("reward/missing", "samples", "samples of these groups without a reward, which are not trained"),
    Metric("dynamic_sampling/batches", "batches", "batches of prompts generated for the step"),
    Metric("dynamic_sampling/kept_groups", "groups", "groups that the step trains on"),
    Metric("dynamic_sampling/dropped_groups", "groups", "groups dropped because all their rewards are equal"),
    Metric("dynamic_sampling/surplus_groups", "groups", "groups that were finished after the step was full"),
    Metric("data/dropped_overlong", "prompts", "prompts left out so far because they are longer than the limit"),
    Metric("train/loss", "", "loss of an optimizer step, averaged over the optimizer steps of the step"),
    Metric("train/policy_loss", "", "the part of the loss that the policy gradient makes"),
    Metric("train/value_loss", "", "loss of the critic"),
    Metric("train/grad_norm", "", "norm of the gradient before clipping, averaged over optimizer steps"),
    Metric("train/lr", "", "learning rate of the last optimizer step"),
    Metric("train/entropy", "nats", "mean entropy of the policy per trained token"),
    Metric("train/kl", "nats", "mean estimate of KL(policy || reference) per trained token"),
    Metric(
        "train/kl_clamp_fraction",
        "share",
        "trained tokens whose log-ratio to the reference was clamped for the KL estimate",
    ),
    Metric(
        "train/approx_kl",
        "nats",
        "mean difference of log-probabilities before and after updates; `failurePolicy.klBlowUp` acts on it",
    ),
    Metric(
        "train/ratio_<mean,min,max>",
        "ratio",
        "probability under the present weights over that before the update, per trained token",
    ),
    Metric("train/clip_fraction", "share", "trained tokens whose ratio was clipped"),
    Metric("train/clipped_ratio", "ratio", "mean ratio after clipping"),
    Metric("train/dual_clip_fraction", "share", "trained tokens at the bound of dual clipping"),
    Metric("train/log_ratio_clamp_fraction", "share", "trained tokens whose log-ratio was clamped against overflow"),
    Metric(
        "train/distill/reverse_kl",
        "nats",
        "mean of the student's minus the teacher's log-probability per trained token",
    ),
    Metric(
        "train/distill/teacher_share",
        "share",
        "the teacher's share of the absolute advantages, the rest comes from rewards; see docs/distillation.md",
    ),
    Metric(
        "train/distill/top_k_kl",
        "nats",
        "mean reverse KL to the teacher over its likeliest tokens, per trained token; with `distillation.topK`",
    ),
    Metric("train/is_weight", "ratio", "mean weight of `algorithm.importance`: trainer's over engine's probability"),
    Metric("train/is_weight_max", "ratio", "largest of these weights"),
    Metric("train/is_oob_fraction", "share", "trained tokens whose weight was outside the bounds"),
    Metric("train/is_rows_dropped", "samples", "samples without any token inside the bounds"),
    Metric("train/logprob_abs_diff", "nats", "mean absolute difference of trainer's and engine's log-probabilities"),
    Metric("train/logprob_error_multiplier", "ratio", "mean exponential of that difference; 1 where the two agree"),
    Metric("train/behavior_weight", "ratio", "mean weight of decoupled PPO: proximal over behavior policy"),
    Metric("train/behavior_drop_fraction", "share", "trained tokens dropped because that weight is above its bound"),
    Metric("train/average_version", "versions", "mean version that generated the trained tokens"),
    Metric("train/current_version", "versions", "version that the step trains"),
    Metric(
        "train/inference_fallbacks",
        "steps",
        "steps since the trainer started whose old log-probabilities it computed because algorithm.inference did not answer",
    ),
    Metric("train/critic_grad_norm", "", "train/grad_norm of a critic in a group of its own (algorithm.critic.group)"),
    Metric("train/critic_lr", "", "train/lr of a critic in a group of its own"),
    Metric("train/values", "reward", "mean value that the critic predicts"),
    Metric("train/value_clip_ratio", "share", "values that moved further than the clip range"),
    Metric(
        "train/explained_variance",
        "",
        "1 - Var(return - value) / Var(return); 1 is a perfect critic, 0 one that predicts nothing",
    ),
    Metric("train/returns", "reward", "mean target of the critic"),
    Metric("train/returns/<mean,min,max>", "reward", "returns per trained token"),
    Metric("train/advantages/<mean,min,max>", "", "advantages per trained token"),
    Metric("train/rewards/<mean,std,min,max>", "reward", "rewards after shaping, as advantages are computed from them"),
    Metric("train/rewards/<mean,std,min,max>/<component>", "reward", "the same for a part of the reward (GDPO)"),
    Metric("train/rows/total", "samples", "samples of the step"),
    Metric("train/rows/invalid", "samples", "samples left out of the loss because they failed or have no reward"),
    Metric("train/groups/total", "groups", "prompt groups of the step"),
    Metric("train/groups/degenerate", "groups", "groups with fewer than two samples that have a reward"),
    Metric("train/groups/zero_std", "groups", "groups whose rewards are all equal, so that their advantages are 0"),
    Metric(
        "train/groups/zero_std/<component>", "groups", "groups in which a part of the reward is equal for all (GDPO)"
    ),
    Metric(
        "train/staleness_<mean,max>",
        "versions",
        "age of the trained groups: the step's version minus the oldest version in a group",
    ),
    Metric("train/update_success", "share", "optimizer steps that were applied"),
    Metric("train/skipped_updates", "updates", "optimizer steps skipped so far because the gradient was not finite"),
    Metric("train/empty_steps", "updates", "optimizer steps so far that had no trained token"),
    Metric("train/early_stopped", "0 or 1", "whether `maxPolicyRatio` or `maxPolicyKl` ended the step's updates early"),
    Metric(
        "mismatch/kl",
        "nats",
        "KL between engine and trainer over tokens of the same version; `failurePolicy.mismatch` acts on it",
    ),
    Metric(
        "mismatch/mean_abs_diff", "nats", "mean absolute difference between the log-probabilities of engine and trainer"
    ),
    Metric("mismatch/max_ratio", "ratio", "largest ratio between the probabilities of engine and trainer"),
    Metric(
        "mismatch/share_clipped",
        "share",
        "tokens whose ratio between engine and trainer is outside the bounds of the loss",
    ),
    Metric(
        "rollout/mismatch_kl/age_<number>",
        "nats",
        "KL between engine and trainer over tokens that are so many versions old",
    ),
    Metric(
        "rollout/mismatch_kl/length_<number>",
        "nats",
        "KL between engine and trainer over completions with so many tokens or more, up to the next length",
    ),
    Metric(
        "rollout/mismatch_abs_diff/age_<number>",
        "nats",
        "mean absolute difference between log-probabilities of engine and trainer, over tokens that are so many versions old",
    ),
    Metric(
        "val/accuracy",
        "share",
        "validation samples with a reward of at least 1; not meaningful for rewards on another scale",
    ),
    Metric("val/reward_mean", "reward", "mean reward of validation samples"),
    Metric("val/pass@<n>", "share", "validation prompts of which one of n samples has a reward of at least 1"),
    Metric("val/response_length_mean", "tokens", "mean length of validation completions"),
    Metric("val/truncation_rate", "share", "validation completions cut at a limit of length"),
    Metric("val/prompts", "prompts", "validation prompts, failed ones included"),
    Metric("val/errors", "prompts", "validation prompts that failed"),
    Metric(
        "val/<set>/<accuracy,reward_mean,response_length_mean,truncation_rate,prompts,errors>",
        "",
        "the same metrics for the validation prompts of one data set of `data.sets`",
    ),
    Metric("val/<set>/pass@<n>", "share", "pass@n of the validation prompts of one data set of `data.sets`"),
    Metric("rollout/total_reward/<spread>", "reward", f"rewards: {SPREAD}"),
    Metric("rollout/reward/<component>/<spread>", "reward", f"components of the reward by name: {SPREAD}"),
    Metric("rollout/turns_per_sample/<spread>", "turns", f"turns of the model: {SPREAD}, and p95, p99"),
    Metric("rollout/total_turns", "turns", "turns of the model in the step"),
    Metric("rollout/gen_tokens_per_sample/<spread>", "tokens", f"generated tokens: {SPREAD}"),
    Metric("rollout/env_tokens_per_sample/<spread>", "tokens", f"tokens that the environment wrote: {SPREAD}"),
    Metric("rollout/total_tokens_per_sample/<spread>", "tokens", f"tokens of both: {SPREAD}"),
    Metric("rollout/mean_gen_tokens_per_sample", "tokens", "mean length of completions"),
    Metric("rollout/max_gen_tokens_per_turn/<max,mean,p95>", "tokens", "longest turn of a sample"),
    Metric("rollout/env_seconds_per_sample/mean", "s", "mean time in the environment"),
    Metric("rollout/truncation_rate", "share", "completions cut at maxNewTokens or maxSequenceLength"),
    Metric("rollout/natural_termination_rate", "share", "episodes that the environment ended"),
    Metric("rollout/max_turns_reached_rate", "share", "episodes that env.maxTurns ended"),
    Metric(
        "rollout/finish_reason/<reason>_rate",
        "share",
        "samples by why they ended: stop, length, seq_limit, terminated, max_turns, error",
    ),
    Metric("rollout/timing/rollout/<part>", "s", "time of a prompt group in the rollout process, by part"),
    Metric(
        "rollout/branches", "branches", "calls of agents that did not continue the only open end of their conversation"
    ),
    Metric("rollout/unspliced", "calls", "branches whose ids could not be attached to those of the earlier call"),
    Metric("rollout/filtered_groups", "groups", "groups of the step dropped by a filter"),
    Metric("rollout/stale_groups", "groups", "groups dropped because they are older than maxStaleness"),
    Metric("rollout/cancelled_groups", "groups", "groups cancelled before they were finished"),
    Metric("rollout/tokens_per_second", "tokens/s", "tokens that all engines generate now"),
    Metric("rollout/running", "samples", "samples that the engines generate now"),
    Metric("rollout/waiting", "samples", "samples that wait for a place in an engine"),
    Metric("rollout/kv_use", "share", "use of the fullest KV cache"),
    Metric("rollout/queue_seconds", "s", "mean wait for a place, of the slowest engine"),
    Metric("rollout/prefix_hit_share", "share", "prompt tokens found in the prefix cache"),
    Metric("rollout/queue_depth", "groups", "mean number of groups that wait for a rollout or are generated"),
    Metric("rollout/starved_seconds", "s", "mean time in the step for which a rollout had nothing to generate"),
    Metric("rollout/redispatch_total", "groups", "groups given to another rollout so far"),
    Metric("rollout/redispatch_total/<kind>", "groups", "groups given to another rollout so far, by cause"),
    Metric("rollout/engines_lost_total", "engines", "engines that ended or hung so far"),
    Metric("rollout/<counter>_total", "", "counters of the rollout processes since they started"),
    Metric("rollout/max_consecutive_infra_drops", "groups", "longest series of groups that failed for infrastructure"),
    Metric("actor/queue_depth", "groups", "mean number of finished groups that wait for the actor"),
    Metric("actor/starved_seconds", "s", "time in the step for which the actor had nothing to train on"),
    Metric(
        "env/<counter>_total",
        "",
        "counters of the environments since they started: rows, calls, starts, deaths, timeouts, data_failures, sessions_moved, calls_refused",
    ),
    Metric(
        "<env,val>/<return,reward>",
        "reward",
        "mean sum of rewards of an episode of a simulator; mean reward of one of its steps",
    ),
    Metric("<env,val>/episode_len", "steps", "mean length of an episode"),
    Metric("<env,val>/<success_once,success_at_end>", "share", "episodes with success in any step, in the last step"),
    Metric("<env,val>/num_trajectories", "episodes", "finished episodes"),
    Metric(
        "env/<lost_episodes,repeated_collections>", "", "episodes and collections done again after a failure, so far"
    ),
    Metric("env/interventions", "", "actions that a person took in the step"),
    Metric("env/<steps,steps_total>", "steps", "steps of simulators in the step, and so far"),
    Metric(
        "judge/<counter>_total",
        "",
        "counters of judges since they started: answers, retries, failures (rows without a score)",
    ),
    Metric("weights/version", "versions", "version that was synced"),
    Metric("weights/publish_seconds", "s", "time from the end of training to the last rollout that holds the version"),
    Metric("weights/apply_seconds", "s", "longest time in which a rollout loaded the weights"),
    Metric("weights/pause_seconds", "s", "longest pause of generation"),
    Metric("weights/bytes", "bytes", "bytes sent to rollouts"),
    Metric("weights/failed_receivers", "rollouts", "rollouts that did not take the version"),
    Metric(
        "weights/late_receivers",
        "rollouts",
        "rollouts that were slower than the others, and took the version while the run went on",
    ),
    Metric("weights/patch_share", "share", "bytes of the patch over those of all weights"),
    Metric("weights/patched_receivers", "rollouts", "rollouts that took a patch"),
    Metric("weights/relayed_receivers", "rollouts", "rollouts that got the weights from another rollout"),
    Metric(
        "weights/content_check_<passed,skipped>_total",
        "checks",
        "comparisons of a rollout's log-probabilities with the trainer's so far",
    ),
    Metric("weights/lag_max", "versions", "how far the slowest member is behind the newest version"),
    Metric("ledger/<state>", "groups", "prompt groups in an open state: pending, leased, generated"),
    Metric("ledger/acknowledged", "groups", "groups trained so far"),
    Metric("ledger/dropped", "groups", "groups dropped so far: failed too often or not usable"),
    Metric("ledger/discarded", "groups", "groups discarded so far: filtered, stale or surplus"),
    Metric(
        "ledger/<requeued,late>_total", "groups", "groups given out again, and answers that came after that, so far"
    ),
    Metric(
        "failures_total/<group>/<kind>", "failures", "failures of members so far, such as actor/restart or rollout/lost"
    ),
    Metric(
        "trackers/disabled",
        "trackers",
        "trackers of the job that could not be opened or have raised; the runner's log says why",
    ),
    Metric("perf/tokens_per_second", "tokens/s", "tokens of the step, prompts included, over its duration"),
    Metric(
        "perf/tokens_per_second_per_device", "tokens/s", "the same per accelerator, or per process where there is none"
    ),
    Metric("perf/train_tokens_per_second", "tokens/s", "tokens of the step over the time of training alone"),
    Metric("perf/env_steps_per_second", "steps/s", "steps of simulators over the duration of the step"),
    Metric("perf/dp_imbalance", "ratio", "tokens of the data-parallel rank with most work over the mean"),
    Metric("perf/padding_waste", "share", "positions of a micro-batch that hold no token"),
    Metric("offload/<bytes,seconds>", "bytes, s", "moved from the devices to main memory"),
    Metric("onload/<bytes,seconds>", "bytes, s", "moved back to the devices"),
    Metric("time/step", "s", "the whole step"),
    Metric("time/rollout", "s", "the trainer's wait for enough finished groups"),
    Metric("time/reward", "s", "mean time of a sample in the environment"),
    Metric("time/inference", "s", "log-probabilities of trainer, reference and critic before the update"),
    Metric("time/train", "s", "the call that trains"),
    Metric("time/critic", "s", "training of a critic in a group of its own, after time/train"),
    Metric("time/<forward_backward,optimizer>", "s", "parts of training"),
    Metric("time/sync", "s", "sending the weights to rollouts"),
    Metric("time/check", "s", "wait for the comparison of log-probabilities"),
    Metric("time/validation", "s", "validation, in steps that have one"),
    Metric("time/checkpoint", "s", "pause for a checkpoint, in steps that have one"),
    Metric("time/<idle_actor,idle_rollout>", "s", "time in which the actor or the rollouts could not work"),
)
"""In the order of the page: specific names before forms that also match them."""


def find(name: str) -> Metric | None:
    """Return the metric of this exact name, None when no metric has it. Of several entries the most specific one is returned."""
    return min((metric for metric in METRICS if metric.describes(name)), key=_openness, default=None)


def _openness(metric: Metric) -> tuple[int, int]:
    """Return how many names an entry may stand for, as a sort key: its parts that take any text, then those that take one of several."""
    parts = _PARTS.findall(metric.name)
    choices = sum("," in part for part in parts)
    return len(parts) - choices, choices


def search(text: str) -> Sequence[Metric]:
    """Return the metric named `text`; where there is none, those whose name or meaning contains it, and else the nearest names."""
    if exact := find(text):
        return [exact]
    query = text.lower()
    if matches := [metric for metric in METRICS if query in metric.name.lower() or query in metric.meaning.lower()]:
        return matches
    similar = difflib.get_close_matches(text, [metric.name for metric in METRICS], n=3)
    return [metric for metric in METRICS if metric.name in similar]


def render_page() -> str:
    """Return docs/metrics.md."""
    lines = ["# Metrics", "", *textwrap.wrap(INTRODUCTION, MAX_LINE)]
    rooms: dict[str, list[Metric]] = {}
    for metric in METRICS:
        rooms.setdefault(metric.name.partition("/")[0] if "/" in metric.name else "the step", []).append(metric)
    for room, metrics in rooms.items():
        lines += ["", f"## {room}", ""]
        for metric in metrics:
            item = f"- `{metric.name}`{f' ({metric.unit})' if metric.unit else ''}: {metric.meaning}"
            lines += textwrap.wrap(
                item, MAX_LINE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"
