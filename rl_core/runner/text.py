"""Builds the text programs and connects their parts.

data, ledger, Admission -> TrainingAccount -> Dispatcher        who holds which group
                           StepGroups                           the groups of a step, for the loop
Members -> WeightSync -> ContentCheck                           who serves which version
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from rl_core.api.data import DataSpec, whole_weights
from rl_core.api.job import RLJob
from rl_core.api.records import DatumSpec
from rl_core.channel import Channel
from rl_core.data.dataset import PromptDataset, load_sets
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.members import Incarnation, MemberState
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT, TRAJECTORIES, VALIDATION
from rl_core.runner.admission import Admission, Bounded, OnPolicy
from rl_core.runner.changes import for_elastic_roles
from rl_core.runner.content_check import ContentCheck
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.history import LedgerFile
from rl_core.runner.joining import build_strategies
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.limits import check_token_ids, sequence_limit
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.members import Members
from rl_core.runner.prompt_order import Part
from rl_core.runner.prompts import Prompts
from rl_core.runner.record_mover import RecordMover
from rl_core.runner.run import Run
from rl_core.runner.samples import Samples
from rl_core.runner.saving import Saving
from rl_core.runner.startup import Startup
from rl_core.runner.step_groups import StepGroups
from rl_core.runner.sync import WeightSync
from rl_core.runner.time_sharing import build_device_schedule
from rl_core.runner.training_account import RecordMoves, TrainingAccount
from rl_core.runner.validation import Validation
from rl_core.runner.workload import Workload

P = TypeVar("P")
logger = logging.getLogger(__name__)

ATTEMPTS = {"data": 1, "deadline": 1, "config": 1, "infrastructure": 3, "worker_lost": 5, "stale": 20, "epoch": 1000}
"""Attempts of a prompt group per requeue reason. Rollouts have retried data and deadline failures already; worker losses count only
while they are consecutive.
"""


def build_text_program(program: Callable[..., P], run: Run) -> P:
    """Load the job's prompts, launch its worker groups, and return `program` built with its parts."""
    job, spec = run.job, run.job.spec
    tokenizer = Tokenizer.from_files(run.model_files, origin=spec.model.path)
    config = json.loads(run.model_files["config.json"])
    limit = sequence_limit(spec, config)
    check_token_ids(spec, config)
    train, validation = load_data(job, tokenizer, limit)
    ledger = PromptLedger(
        train,
        seed=spec.algorithm.seed,
        shuffle=spec.data.shuffle,
        lease_seconds=spec.runtime.lease_seconds,
        max_attempts=ATTEMPTS,
        parts=mixture(spec.data, train.sizes),
    )
    launch_groups(run, max_seq_len=limit)
    staleness = spec.algorithm.max_staleness
    return assemble(
        program,
        run,
        ledger,
        admission=Bounded(staleness, spec.algorithm.prompts_per_step)
        if staleness
        else OnPolicy(spec.rollout.oversample),
        trajectories=run.channel(TRAJECTORIES),
        results=run.channel(VALIDATION),
        validation=None if validation is None else validation.samples,
        probe_prompt=[int(token) for message in train[0]["message_log"] for token in message["token_ids"]],
        dropped_overlong=train.dropped_overlong,
        decode=lambda token: tokenizer.decode([token]),
    )


def assemble(
    program: Callable[..., P],
    run: Run,
    ledger: PromptLedger,
    *,
    admission: Admission,
    trajectories: Channel,
    results: Channel,
    validation: Sequence[DatumSpec] | None = None,
    probe_prompt: Sequence[int] | None = None,
    dropped_overlong: int = 0,
    decode: Callable[[int], str] = str,
) -> P:
    """Return `program` built with its parts over the launched worker groups of `run`.

    `trajectories` carries the records of finished groups, `results` the scores of validation. `validation` are the validation prompts; None
    means no validation. `probe_prompt` are the token ids of the content check; None means no check. `dropped_overlong` is the number of
    training prompts that were left out because of their length, for a metric. `decode` returns the text of a token, for the kept samples.
    """
    spec, actor = run.job.spec, run.groups[ACTOR]
    samples = Samples(spec.samples, run.output / "samples", epoch=run.epoch, decode=decode, trackers=run.trackers)
    workload, mover = Workload(), RecordMover(trajectories)
    dispatcher = build_dispatcher(run, ledger, admission, workload=workload, move_records=mover.add)
    schedule = build_device_schedule(spec, cluster=run.cluster, actor=actor)
    versions = MemberVersions(dispatcher.record_served)
    strategies = build_strategies(
        run.planned.values(),
        run.groups,
        cluster=run.cluster,
        versions=versions,
        release=dispatcher.owner_lost,
        schedule=schedule,
        seconds=spec.runtime.deadlines.wait_ready,
        start_args=(trajectories, results),
    )
    members = Members(run.cluster, strategies, run.roster, run.board, spec.runtime.deadlines, fail=run.stops.fail)
    check = (
        None
        if probe_prompt is None
        else ContentCheck(run.applied, cluster=run.cluster, actor=actor, schedule=schedule, prompt_ids=probe_prompt)
    )
    sync = WeightSync(
        run.applied,
        cluster=run.cluster,
        actor=actor,
        members=members,
        versions=versions,
        roster=run.roster,
        workload=workload,
        check=check,
    )
    critic = None if (name := spec.algorithm.critic_group) is None else run.groups[name]
    trained = [actor] if critic is None else [actor, critic]
    saving = Saving.of(run, schedule=schedule, groups=trained, weights_digest=lambda: sync.digest)
    startup = Startup(
        spec.runtime.deadlines,
        run.progress,
        run.board,
        trained=trained,
        schedule=schedule,
        members=members,
        sync=sync,
        saving=saving,
        stops=run.stops,
    )
    prompts = Prompts(
        dispatcher=dispatcher,
        steps=StepGroups(dispatcher, workload),
        workload=workload,
        mover=mover,
        trajectories=trajectories,
        ledger_file=LedgerFile(run.output / "ledger.jsonl", retrying=saving.with_retries),
        samples=samples,
        validation=None
        if validation is None
        else Validation(spec, validation, dispatcher=dispatcher, results=results, attempts=ATTEMPTS),
        dropped_overlong=dropped_overlong,
    )
    return program(run, saving, startup=startup, schedule=schedule, sync=sync, prompts=prompts)


def build_dispatcher(
    run: Run,
    ledger: PromptLedger,
    admission: Admission,
    *,
    workload: Workload,
    move_records: Callable[[RecordMoves], None],
) -> Dispatcher:
    """Return the dispatcher of the prompts of `ledger`; `move_records` changes the keys of records on the channel."""
    spec, hub = run.job.spec, run.cluster.hub

    def is_live(name: str, incarnation: Incarnation) -> bool:
        member = hub.get(name)
        return (
            member is not None
            and member.incarnation == incarnation
            and not member.state.gone
            and member.state not in (MemberState.DRAINING, MemberState.SUSPECT)  # A silent member gets no new work.
        )

    return Dispatcher(
        TrainingAccount(
            ledger,
            spec.algorithm,
            admission,
            data_ranks=spec.actor.data_parallel,
            kept_filtered=spec.samples.groups,
        ),
        workload,
        is_live=is_live,
        is_short=run.roster.short,
        move_records=move_records,
        fail=run.stops.fail,
    )


def launch_groups(run: Run, *, max_seq_len: int) -> None:
    """Launch actor, rollout, env and the groups that the job declares; their workers are constructed when members join."""
    spec = run.job.spec
    stable = for_elastic_roles(spec)
    run.launch(ACTOR, spec)
    run.launch(ROLLOUT, stable, {"max_seq_len": max_seq_len})
    run.launch(ENV, stable.env)
    for name, group in run.planned.items():
        if group.config is not None:
            run.launch(name, dict(group.config))


def load_data(job: RLJob, tokenizer: Tokenizer, limit: int) -> tuple[PromptDataset, PromptDataset | None]:
    """Return the training and validation prompts."""
    data, task = job.spec.data, job.spec.env.type
    train, validation = (
        load_sets(data, tokenizer, validation=held_out, task_name=task, max_seq_len=limit) for held_out in (False, True)
    )
    return train, validation if validation.samples else None


def mixture(data: DataSpec, sizes: Sequence[int]) -> list[Part]:
    """Return the data sets that are mixed, whose numbers of training prompts are `sizes`."""
    weights = [data_set.weight for data_set in data.sets or () if data_set.weight is not None]
    return [Part(size, weight) for size, weight in zip(sizes, whole_weights(weights) or sizes, strict=True)]
