"""The program over real parts: what a step reports, what a stop leaves, what a rule over its numbers does."""

from types import SimpleNamespace

import pytest

from rl_core.api.job import RLJob
from rl_core.channel import Channel
from rl_core.messages.groups import GroupEntry
from rl_core.messages.members import MemberState
from rl_core.messages.weights import PublishReport, ReceiverAck
from rl_core.plan.groups import groups_of
from rl_core.runner.admission import OnPolicy
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.reasoning import ReasoningRunner
from rl_core.runner.run import Run
from rl_core.runner.runner import Runner
from rl_core.runner.status import Phase
from rl_core.runner.stopping import StopKind
from rl_core.runner.text import assemble
from rl_core.workers.member import Member

JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "j"},
    "spec": {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "algorithm": {"promptsPerStep": 2, "groupSize": 2, "steps": 2},
        "rollout": {"replicas": 1},
        "checkpoint": {"everySteps": 0},
    },
}
ROLLOUT = Member(
    name="rollout:0", role="rollout", group="rollout", rank=0, pod="j-rollout-0", address="tcp://127.0.0.1:1", pid=1, host_token="",
    incarnation=(0, 0), state=MemberState.SERVING, policy_version=0,
)  # fmt: skip


class Result:
    """Stands in for the result of a group call: `answer()` is carried out when it is waited for."""

    def __init__(self, answer):
        self._answer = answer

    def wait(self, timeout=None):
        return self._answer()

    def wait_done(self, timeout=None):
        return True

    def done(self):
        return True

    def cancel(self):
        pass


class Actors:
    """Stands in for the actor group. A step's groups are finished while the data ranks receive."""

    def __init__(self, run, *, ranks):
        self.run, self.ranks, self.phases, self.trained = run, ranks, {}, []

    def __getattr__(self, method):
        return lambda *args: Result(lambda: self.note(method))

    def note(self, method, value=None):
        self.phases[method] = self.run.state.board.phase
        return [value] * len(self.ranks)

    def within(self, seconds):
        return self

    def publisher_address(self):
        return Result(lambda: ["tcp://publisher"])

    def sync_model_to_rollout(self, version, receivers, min_acks):
        report = PublishReport(
            version=version, digest="d", acked=tuple(one.name for one in receivers), failed={}, seconds=0.1, bytes=8,
            transport="shared", copy_seconds=0.0, sync_seconds=0.0, apply_seconds=0.0, pause_seconds=0.0,
        )  # fmt: skip
        return Result(lambda: [report])

    def recv_batch(self, channel, groups, step, seconds):
        def receive():
            self.note("recv_batch")
            self.run.generate()
            return self.ranks

        return Result(receive)

    def run_training(self, step):
        def train():
            self.trained.append(step)
            self.run.while_training()
            return self.note("run_training", self.run.metrics)

        return Result(train)


class Job:
    """Real parts; the cluster, its groups and the data ranks are stand-ins for our own ports."""

    def __init__(self, tmp_path, *, ranks=({"rollout/total_turns": 4.0},), **spec):
        self.metrics, self.logged, self.while_training = {"actor/loss": 0.5}, [], lambda: None
        job = RLJob.model_validate(JOB | {"spec": JOB["spec"] | spec})
        hub = SimpleNamespace(get=lambda name: ROLLOUT)
        cluster = SimpleNamespace(
            hub=hub,
            members=lambda role=None, **also: [ROLLOUT] if role in (None, "rollout") else [],
            wait_ready=lambda roles, seconds, *, on_poll: None,
            call=lambda name, method, *args, timeout: ReceiverAck(version=self.state.progress.version, digest="d"),
        )
        prompts = [{"idx": 10 * number} for number in range(8)]
        ledger = PromptLedger(prompts, seed=0, shuffle=False, lease_seconds=60, max_attempts=3)
        self.actors = Actors(self, ranks=list(ranks))
        group = SimpleNamespace(construct=lambda member: None)
        trackers = SimpleNamespace(
            log_config=lambda config: None,
            log=lambda step, values: self.logged.append((step, values)),
            disabled={},
        )
        self.state = Run(job, cluster, trackers, planned=groups_of(job.spec), output=tmp_path)
        self.state.groups.update(actor=self.actors, rollout=group, env=group)
        self.state.roster.acknowledged(0, [("rollout:0", (0, 0))])
        self.program = assemble(
            ReasoningRunner,
            self.state,
            ledger,
            admission=OnPolicy(),
            trajectories=Channel.create("trajectories", local=True),
            results=Channel.create("validation", local=True),
        )
        self.dispatcher = self.program.prompts.dispatcher
        self.runner = Runner(self.state, self.program)

    def generate(self):
        """Lease what the step wants and report it as finished, as rollouts do."""
        leases = []
        poll = SimpleNamespace(on_cancel=None, reply=lambda value: leases.extend(value) or True)
        version = self.state.progress.version
        self.dispatcher.lease_groups(poll, "rollout:0", (0, 0), 99, 20.0, version)
        entries = [
            GroupEntry(
                group_id=lease.group_id, token=lease.token, v_min=version, v_max=version, rewards=(0.0, 1.0), tokens=4,
                informative=True,
            )
            for lease in leases
        ]  # fmt: skip
        for entry in entries:
            self.dispatcher.finish("rollout:0", (0, 0), entry)

    def ledger_lines(self):
        import json

        return [json.loads(line) for line in (self.program.prompts.ledger_file._path).read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    return Job(tmp_path)


def test_a_run_trains_each_group_once_in_order_and_writes_it_down(run):
    summary = run.runner.execute()
    assert (summary.status, summary.step, summary.version) == ("Finished", 2, 2)
    assert [(line["step"], line["group_id"], line["prompt_index"]) for line in run.ledger_lines()] == [
        (1, "0-0", 0), (1, "0-1", 10), (2, "0-2", 20), (2, "0-3", 30),
    ]  # fmt: skip
    assert run.actors.trained == [1, 2] and [step for step, _ in run.logged] == [1, 2]
    waits = {"rollout/starved_seconds", "actor/starved_seconds", "rollout/queue_depth", "actor/queue_depth"}
    assert all(waits <= set(metrics) for _, metrics in run.logged) and "workload" in run.runner.status()


def test_rollout_metrics_are_those_of_all_ranks(tmp_path):
    ranks = [
        {"rollout/total_turns": 8.0, "rollout/total_reward/mean": 0.25, "rollout/total_reward/max": 1.0},
        {"rollout/total_turns": 4.0, "rollout/total_reward/mean": 0.75, "rollout/total_reward/max": 3.0},
        {},  # a step that was cut had no group for it
    ]
    run = Job(tmp_path, ranks=ranks)
    run.runner.execute()
    logged = run.logged[0][1]
    assert logged["rollout/total_turns"] == 12.0 and logged["rollout/total_reward/mean"] == 0.5
    assert logged["rollout/total_reward/max"] == 3.0 and logged["train/loss"] == 0.5


def test_the_status_has_finite_numbers_only_as_json_has_no_others(run):
    run.metrics = {"actor/loss": float("nan"), "actor/kl": float("inf"), "actor/lr": 0.5}
    run.runner.execute()
    shown = run.runner.status()["metrics"]
    assert shown["train/lr"] == 0.5 and not {"train/loss", "train/kl"} & set(shown)
    assert "train/loss" in run.logged[0][1]


def test_the_run_generates_between_two_phases_and_saves_at_its_end(run):
    run.runner.execute()
    assert run.actors.phases["recv_batch"] is Phase.GENERATING
    assert run.actors.phases["run_training"] is Phase.TRAINING
    assert run.actors.phases["init_worker"] is Phase.STARTING
    assert run.actors.phases["export_hf"] is Phase.CHECKPOINTING


def test_a_step_that_was_cancelled_is_left_and_its_groups_are_not_acknowledged(run):
    def stop():
        run.metrics = None
        run.runner.stop("SIGTERM", StopKind.INTERRUPT)

    run.while_training = stop
    summary = run.runner.execute()
    assert (summary.status, summary.step) == ("Interrupted", 0)
    assert run.ledger_lines() == [] and run.program.steps.metrics()["ledger/acknowledged"] == 0


RULES = {
    "nonFiniteLoss": ({"steps": 2}, {"actor/loss": float("nan")}),
    "klBlowUp": ({"above": 1.0, "steps": 2}, {"actor/approx_kl": 5.0}),
    "mismatch": ({"kl": 0.1, "steps": 2}, {"mismatch/kl": 0.2}),
    "rewardCollapse": ({"below": 0.9, "steps": 2}, {"actor/loss": 0.5}),
}


@pytest.mark.parametrize("action", ["RestartFromCheckpoint", "Pause", "FailJob"])
@pytest.mark.parametrize("rule", list(RULES))
def test_numbers_that_a_rule_finds_wrong_are_not_saved_whatever_comes_of_it(tmp_path, rule, action):
    fields, metrics = RULES[rule]
    policy = {rule: {**fields, "action": action}}
    loss = {"loss": {"klCoefficient": 0.1}} if rule == "klBlowUp" else {}
    algorithm = JOB["spec"]["algorithm"] | loss
    run = Job(tmp_path, failurePolicy=policy, algorithm=algorithm)
    run.metrics = metrics
    run.program.saving.checkpoints.request()
    summary = run.runner.execute()
    assert summary.status == "Interrupted" and f"failurePolicy.{rule} has fired" in run.state.stops.reason
    assert run.runner.status()["streaks"][rule] == 2, "the operator reads it too"
    assert [step for step in run.actors.phases if step == "export_hf"] == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [(StopKind.FINISH, "Stopped"), (StopKind.SUSPEND, "Suspended"), (StopKind.INTERRUPT, "Interrupted")],
)
def test_how_a_run_that_was_asked_to_end_is_reported(run, kind, status):
    run.while_training = lambda: run.runner.stop("enough", kind)
    summary = run.runner.execute()
    assert (summary.status, summary.step) == (status, 1)
