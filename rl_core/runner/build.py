"""From a resolved job to a program with its parts, in the runner's process: data, hub, groups, parts, program."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.api.job import RLJob
from rl_core.channel import Channel
from rl_core.channel.client import configure
from rl_core.data.dataset import PromptDataset, load_prompts
from rl_core.data.tokenizer import Tokenizer, read_files
from rl_core.messages.members import Incarnation
from rl_core.messages.rpc import Caller
from rl_core.observability.trackers import Trackers
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT, groups_of
from rl_core.runner.admission import Bounded, OnPolicy
from rl_core.runner.asynchronous import AsyncReasoningRunner
from rl_core.runner.base import Runner
from rl_core.runner.changes import for_elastic_roles
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.limits import sequence_limit
from rl_core.runner.parts import build_parts
from rl_core.runner.reasoning import ReasoningRunner
from rl_core.runner.validation import Validation
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import IncomingCall, current_caller, inline
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.hub import Hub

logger = logging.getLogger(__name__)

ATTEMPTS = {"data": 1, "deadline": 1, "infrastructure": 3, "worker_lost": 5, "stale": 20, "epoch": 1000}
"""Attempts of a group per reason; data and deadline failures were already retried by the rollout, losses count in a row."""


def build(job: RLJob, identity: Identity, *, output: Path, resume: str) -> Runner:
    """Return the program with its parts; its hub serves from here on."""
    spec, model = job.spec, Path(job.spec.model.path)
    if not (model / "config.json").is_file():
        raise ConfigError(f"model.path must be a folder with config.json, got {model}; check the path")
    files = read_files(model)
    tokenizer = Tokenizer.from_files(files, origin=str(model))
    limit = sequence_limit(spec, json.loads(files["config.json"]))
    train, validation = load_data(job, tokenizer, limit)
    ledger = PromptLedger(
        train,
        seed=spec.algorithm.seed,
        shuffle=spec.data.shuffle,
        lease_seconds=spec.runtime.lease_seconds,
        max_attempts=ATTEMPTS,
    )
    trackers = Trackers.build(spec.trackers, name=job.metadata.name, output=output)
    keys = KeyRing(Path(identity.curve_dir), "runner") if identity.curve_dir else None
    configure(identity.channel, keys, identity)
    hub = Hub(job=job, identity=identity, keys=keys, files=files)
    cluster = Cluster(hub)
    staleness = spec.algorithm.max_staleness
    parts = build_parts(
        job,
        cluster,
        launch_groups(job, cluster, max_seq_len=limit),
        ledger,
        trackers,
        trajectories=Channel.create("trajectories"),
        results=Channel.create("validation"),
        output=output,
        admission=Bounded(staleness, spec.algorithm.prompts_per_step)
        if staleness
        else OnPolicy(spec.rollout.oversample),
        probe_prompt=[int(token) for message in train[0]["message_log"] for token in message["token_ids"]],
        epoch=identity.epoch,
        resume=resume,
        first_epoch=int(os.environ.get("RLJOB_FIRST_EPOCH", identity.epoch)),
        in_cluster=identity.in_cluster,
    )
    measured = None
    if validation is not None:
        measured = Validation(spec, validation.samples, desk=parts.dispatcher, results=parts.results, attempts=ATTEMPTS)
    program = (AsyncReasoningRunner if staleness else ReasoningRunner)(
        parts, measured, dropped_overlong=train.dropped_overlong
    )
    hub.listen(joined=parts.members.joined, lost=parts.members.lost)
    serve_groups(hub, parts.dispatcher)
    hub.start()
    return program


def launch_groups(job: RLJob, cluster: Cluster, *, max_seq_len: int) -> dict[str, WorkerGroup]:
    """Return the groups of the three roles; their members are constructed as they join."""
    stable = for_elastic_roles(job.spec)
    arguments: dict[str, tuple[Any, ...]] = {
        ACTOR: (job.spec,),
        ROLLOUT: (stable, {"max_seq_len": max_seq_len}),
        ENV: (stable.env,),
    }
    return {
        name: WorkerGroup.of(group.worker, *arguments[name]).launch(cluster, name=name)
        for name, group in groups_of(job.spec).items()
    }


def serve_groups(hub: Hub, dispatcher: Dispatcher) -> None:
    """Serve the account of a group on the hub: to rollouts lease, renew, delivered and give back; to data ranks admission."""

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
