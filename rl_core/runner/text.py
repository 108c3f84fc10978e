"""Builds the programs that train on text: prompts, ledger, dispatcher, weight sync, content check, validation.

data, ledger, Admission -> TrainingAccount -> Dispatcher        who holds which group
Members -> WeightSync -> ContentCheck                           who serves which version
Saving, Startup
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob
from rl_core.api.records import DatumSpec
from rl_core.channel import Channel
from rl_core.data.dataset import PromptDataset, load_prompts
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.groups import EndOfStep
from rl_core.messages.members import Incarnation, MemberState
from rl_core.messages.rpc import Caller
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT, TRAJECTORIES, VALIDATION
from rl_core.runner.admission import Admission, Bounded, OnPolicy
from rl_core.runner.changes import for_elastic_roles
from rl_core.runner.content_check import ContentCheck
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.handover import VersionHandover
from rl_core.runner.history import LedgerFile
from rl_core.runner.joining import build_strategies
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.limits import sequence_limit
from rl_core.runner.members import Members
from rl_core.runner.prompts import Prompts
from rl_core.runner.run import Run
from rl_core.runner.saving import Saving
from rl_core.runner.startup import Startup
from rl_core.runner.sync import WeightSync
from rl_core.runner.time_sharing import build_device_schedule
from rl_core.runner.training_account import TrainingAccount
from rl_core.runner.validation import Validation
from rl_core.transports.rpc import IncomingCall, current_caller, inline
from rl_core.workers.hub import Hub

P = TypeVar("P")
logger = logging.getLogger(__name__)

ATTEMPTS = {"data": 1, "deadline": 1, "infrastructure": 3, "worker_lost": 5, "stale": 20, "epoch": 1000}
"""Attempts of a group per reason. Rollouts have retried data and deadline failures already; losses count in a row."""


def build_text_program(program: Callable[..., P], run: Run) -> P:
    """Return `program` with its parts for the prompts of the job; its groups are launched."""
    job, spec = run.job, run.job.spec
    tokenizer = Tokenizer.from_files(run.model_files, origin=spec.model.path)
    limit = sequence_limit(spec, json.loads(run.model_files["config.json"]))
    train, validation = load_data(job, tokenizer, limit)
    ledger = PromptLedger(
        train,
        seed=spec.algorithm.seed,
        shuffle=spec.data.shuffle,
        lease_seconds=spec.runtime.lease_seconds,
        max_attempts=ATTEMPTS,
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
) -> P:
    """Return `program` with its parts over the launched groups of `run`.

    `results` brings the scores of validation. `probe_prompt`: token ids for the content check, None = no check.
    """
    spec, actor = run.job.spec, run.groups[ACTOR]
    dispatcher = build_dispatcher(run, ledger, admission, trajectories)
    schedule = build_device_schedule(spec, cluster=run.cluster, actor=actor)
    versions = VersionHandover(dispatcher.serves)
    strategies = build_strategies(
        run.planned.values(),
        run.groups,
        cluster=run.cluster,
        versions=versions,
        dispatcher=dispatcher,
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
        dispatcher=dispatcher,
        check=check,
    )
    saving = Saving.of(run, schedule=schedule, group=actor, weights_digest=lambda: sync.digest)
    startup = Startup(
        spec.runtime.deadlines,
        run.progress,
        actor=actor,
        schedule=schedule,
        members=members,
        sync=sync,
        saving=saving,
        stops=run.stops,
    )
    prompts = Prompts(
        dispatcher=dispatcher,
        trajectories=trajectories,
        ledger_file=LedgerFile(run.output / "ledger.jsonl", attempt=saving.with_retries),
        validation=None
        if validation is None
        else Validation(spec, validation, desk=dispatcher, results=results, attempts=ATTEMPTS),
        dropped_overlong=dropped_overlong,
    )
    return program(run, saving, startup=startup, schedule=schedule, sync=sync, prompts=prompts)


def build_dispatcher(run: Run, ledger: PromptLedger, admission: Admission, trajectories: Channel) -> Dispatcher:
    """Return the dispatcher of the prompts of `ledger`; finished groups travel on `trajectories`."""
    spec, hub = run.job.spec, run.cluster.hub

    def is_live(name: str, incarnation: Incarnation) -> bool:
        member = hub.get(name)
        return (
            member is not None
            and member.incarnation == incarnation
            and not member.state.gone
            and member.state not in (MemberState.DRAINING, MemberState.SUSPECT)  # who is silent gets no new work
        )

    def end_step(step: int) -> None:
        for _ in range(spec.actor.data_parallel):
            trajectories.put(EndOfStep(step=step))

    account = TrainingAccount(
        ledger,
        spec.algorithm,
        admission,
        data_ranks=spec.actor.data_parallel,
        lease_seconds=spec.runtime.lease_seconds,
    )
    return Dispatcher(account, is_live=is_live, is_short=run.roster.short, end_step=end_step, fail=run.stops.fail)


def launch_groups(run: Run, *, max_seq_len: int) -> None:
    """Launch actor, rollout and env; their members are constructed as they join."""
    spec = run.job.spec
    stable = for_elastic_roles(spec)
    run.launch(ACTOR, spec)
    run.launch(ROLLOUT, stable, {"max_seq_len": max_seq_len})
    run.launch(ENV, stable.env)


def serve_groups(hub: Hub, dispatcher: Dispatcher) -> None:
    """Serve the dispatcher on the hub: to rollouts lease, renew, delivered and give back; to data ranks admission."""

    def lease_groups(call: IncomingCall, want: int, seconds: float, version: int) -> None:
        dispatcher.lease_groups(call, *_process(call.caller), want, seconds, version)

    async def renew(tokens: list[str]) -> list[str]:
        return dispatcher.renew(*_process(current_caller()), tokens)

    def deliver(call: IncomingCall, token: str) -> None:
        dispatcher.delivered(token)
        call.reply(None)

    calls: dict[str, Callable[..., Any]] = {
        "lease_groups": inline(lease_groups),
        "renew": renew,
        "delivered": inline(deliver),
        "give_back": dispatcher.give_back,
    }
    hub.add_handlers(calls, role=ROLLOUT)
    hub.add_handlers({"admit": dispatcher.admit}, role=ACTOR)


def _process(caller: Caller | None) -> tuple[str, Incarnation]:
    """Return the member name and incarnation of a caller. Raises ConfigError for an anonymous one, which can hold no lease."""
    if caller is None:
        raise ConfigError("only a member of the job can hold leases, got an anonymous caller; connect with an identity")
    return caller.name, caller.incarnation


def load_data(job: RLJob, tokenizer: Tokenizer, limit: int) -> tuple[PromptDataset, PromptDataset | None]:
    """Return the training and validation prompts."""
    data, task = job.spec.data, job.spec.env.type
    train = load_prompts(data.train, data, tokenizer, field="data.train", task_name=task, max_seq_len=limit)
    if train.dropped_overlong:
        logger.warning(
            "data.train: %s prompts of %s tokens or more dropped (data.onOverlong)", train.dropped_overlong, limit
        )
    if data.validation is None:
        return train, None
    return train, load_prompts(
        data.validation, data, tokenizer, field="data.validation", task_name=task, max_seq_len=limit
    )
