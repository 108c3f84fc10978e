"""Real worker processes under a real hub: groups, loss, incarnations, epochs, a runner that comes back at the same address."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

import pytest

from rl_core.api.errors import ConfigError, DataError, DeadlineExceeded, RemoteError, WorkerLost
from rl_core.api.identity import Identity
from rl_core.api.job import RLJob
from rl_core.launch.ports import free_ports
from rl_core.messages.members import MemberId
from rl_core.transports.rpc import RpcClient
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.hub import Hub
from tests import ROOT

SAMPLE = "tests.integration.worker_samples:Sample"


class Job:
    """A hub and the worker processes that a test starts."""

    def __init__(self, epoch=0):
        self.port = free_ports().hub
        self.processes = []
        self.events = []
        self.happened = threading.Condition()
        self.open_hub(epoch)

    def identity(self, epoch, role="runner"):
        return Identity(
            job="j", namespace="default", uid="u", epoch=epoch, role=role, pod="j-actor-0", pod_index=0,
            group=role, rank=0, world_size=1, hub=f"tcp://127.0.0.1:{self.port}",
        )  # fmt: skip

    def open_hub(self, epoch, *, suspect_seconds=30.0, lost_seconds=60.0, job=None):
        """Open a hub that takes no busy machine for a loss."""
        self.hub = Hub(
            identity=self.identity(epoch),
            job=job,
            heartbeat_seconds=0.2,
            suspect_seconds=suspect_seconds,
            lost_seconds=lost_seconds,
        )
        self.hub.add_listeners(
            joined=lambda member: self.note("joined", member, ""), lost=lambda *change: self.note("lost", *change)
        )
        self.hub.add_handlers({"echo": lambda value: value}, role="actor")
        self.cluster = Cluster(self.hub, sizes={"actor": 2, "rollout": 1}, ready_deadline=60)

    def note(self, kind, member, reason):
        with self.happened:
            self.events.append((kind, member.name, member.incarnation, reason))
            self.happened.notify_all()

    def wait_for(self, kind, name, incarnation=(0, 0)):
        """Return the reason of the event once the hub told it."""
        with self.happened:
            assert self.happened.wait_for(lambda: self._find(kind, name, incarnation) is not None, 60), (
                kind,
                name,
                self.events,
            )
            return self._find(kind, name, incarnation)

    def wait_state(self, name, state, *, after=0.0):
        """Return when the hub heard of the member in this state, later than `after`, by the hub's clock."""
        deadline = time.monotonic() + 60
        while True:
            member = self.hub.get(name)
            if member is not None and member.state == state and member.last_seen > after:
                return member.last_seen
            assert time.monotonic() < deadline, (member, self.events)
            time.sleep(0.02)

    def _find(self, *wanted):
        return next((reason for *event, reason in self.events if tuple(event) == wanted), None)

    def start(self, role, rank, *, epoch=0, incarnation="0.0", code=ROOT):
        environ = {
            **os.environ, "RLJOB_NAME": "j", "RLJOB_UID": "u", "RLJOB_ROLE": role, "RLJOB_POD": f"j-{role}-{rank}", "RANK": str(rank),
            "GROUP_NAME": role, "WORLD_SIZE": "2", "RLJOB_EPOCH": str(epoch), "RLJOB_INCARNATION": incarnation,
            "RLJOB_HUB": f"tcp://127.0.0.1:{self.port}", "PYTHONPATH": f"{ROOT}{os.pathsep}{code}", "RLJOB_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        process = subprocess.Popen([sys.executable, "-m", "rl_core.workers.host"], env=environ)
        self.processes.append(process)
        return process

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.cluster.close()
        self.hub.close()


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


@pytest.fixture(scope="module")
def gang():
    """Two actors that many tests share; none of the tests ends them."""
    made = Job()
    for rank in range(2):
        made.start("actor", rank)
    group = WorkerGroup.of(SAMPLE, 10).launch(made.cluster, name="actor")
    made.hub.start()
    made.cluster.wait_ready(["actor"], 60)
    made.group = group
    yield made
    made.close()


def test_a_method_runs_on_all_ranks_and_execute_on_picks_some(gang):
    assert gang.group.add(1).wait(30) == [11, 12]
    assert gang.group.execute_on(1).add(1).wait(30) == [12]
    assert gang.group.add(x=2).wait(30) == [12, 13]
    with pytest.raises(ValueError, match=r"among \[0, 1\], got \[2\]"):
        gang.group.execute_on(0, 2)


def test_views_do_not_change_the_group_under_threads(gang):
    results = {}

    def call(rank):
        results[rank] = [gang.group.execute_on(rank).add(i).wait(30) for i in range(20)]

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {rank: [[10 + i + rank] for i in range(20)] for rank in range(2)}


def test_a_worker_knows_who_it_is_in_its_constructor_and_its_host_never_imports_torch(gang):
    made = gang.group.made().wait(30)
    assert [one["made_at"] for one in made] == [(0, 2, 0), (1, 2, 0)]
    assert [one["torch"] for one in made] == [False, False]
    assert [one["pid"] for one in made] == [process.pid for process in gang.processes[:2]]


async def test_a_result_can_be_awaited(gang):
    assert await gang.group.nap(0.01) == ["rested", "rested"]


def test_durations_hold_the_method_and_its_inner_timers(gang):
    result = gang.group.timed()
    durations = result.consume_durations()
    assert (
        set(durations) == {"timed", "inner", "block"} and durations["timed"] >= durations["inner"] >= durations["block"]
    )
    assert result.consume_duration() == 0.0


def test_errors_of_the_api_keep_their_type_and_others_tell_group_rank_method_type_and_traceback(gang):
    with pytest.raises(DataError, match="bad sample"):
        gang.group.fail_on([1], "data").wait(30)
    with pytest.raises(RemoteError) as caught:
        gang.group.fail_on([1]).wait(30)
    text = str(caught.value)
    assert "actor rank 1: fail_on raised ValueError: bad luck" in text and "worker_samples.py" in text
    with pytest.raises(ExceptionGroup) as several:
        gang.group.fail_on([0, 1]).wait(30)
    assert [type(error) for error in several.value.exceptions] == [RemoteError, RemoteError]
    for rank, error in enumerate(several.value.exceptions):
        shown = "".join(traceback.format_exception(error))
        assert shown.count("Traceback (most recent call last)") == 1, (
            "that of the user's code, without frames of rl_core"
        )
        assert f"actor rank {rank}: fail_on raised ValueError: bad luck" in shown and "method_server.py" not in shown


def test_a_systemexit_in_a_method_is_an_error_and_not_the_end_of_the_worker(gang):
    with pytest.raises(RemoteError, match="SystemExit: 7"):
        gang.group.execute_on(0).leave().wait(30)
    assert gang.group.add(0).wait(30) == [10, 11]


def test_a_stopiteration_in_a_method_is_an_error_and_no_hang(gang):
    with pytest.raises(RemoteError, match="actor rank 0: run_dry raised StopIteration"):
        gang.group.execute_on(0).run_dry().wait(60)


def test_the_deadline_of_a_call_names_who_is_missing_and_not_each_rank_by_itself(gang):
    with pytest.raises(DeadlineExceeded, match=r"block must end on 2 ranks within 0\.1 s.*actor:0 .*actor:1"):
        gang.group.within(0.1).block(0.5).wait()


def test_the_deadline_of_one_call_names_the_workers_method_and_not_what_carries_it(gang):
    with pytest.raises(DeadlineExceeded, match=r"^nap at actor:0 .* was not answered within 0\.2 s"):
        gang.cluster.call("actor:0", "nap", 600, timeout=0.2)


@pytest.mark.parametrize("rank", [True, 0.0, "0", -1, 2])
def test_what_is_no_rank_of_the_group_is_refused(gang, rank):
    with pytest.raises(ValueError, match="ranks of group actor must be among"):
        gang.group.execute_on(rank)


def test_an_unknown_method_is_a_config_error_that_lists_the_known(gang):
    with pytest.raises(ConfigError, match=r"no public method 'nothing'; it has add, "):
        gang.group.execute_on(0).nothing().wait(30)


def test_a_missed_deadline_tells_rank_pod_wait_and_progress(gang):
    assert gang.group.add(0).wait(30) == [10, 11]
    result = gang.group.execute_on(1).nap(600)
    wait_until(lambda: gang.hub.get("actor:1").wait is not None)
    with pytest.raises(DeadlineExceeded) as caught:
        result.wait(0.01)
    result.cancel()
    text = str(caught.value)
    assert "actor:1 (pod j-actor-1" in text and "waits for a nap on nobody" in text and "adds" in text
    assert "actor:0" not in text
    assert gang.group.add(0).wait(30) == [10, 11]


def test_async_methods_go_on_while_a_sync_one_blocks(gang, tmp_path):
    path = tmp_path / "release"
    blocked = gang.group.execute_on(0).hold(str(path))
    wait_until(path.with_suffix(".held").exists)
    assert gang.group.execute_on(0).nap(0).wait(30) == ["rested"]
    assert not blocked.done()
    path.touch()
    assert blocked.wait(30) == ["done"]


def test_workers_call_the_runner_and_each_other(gang):
    assert gang.group.ask_hub({"a": [1, 2]}).wait(30) == [{"a": [1, 2]}] * 2
    wait_until(lambda: gang.group.names("actor").wait(30) == [["actor:0", "actor:1"]] * 2)
    assert gang.group.execute_on(0).call_peer("actor:1", 5).wait(30) == [16]


def test_a_state_and_a_version_reach_the_hub_and_the_other_members(gang):
    gang.group.execute_on(0).be("serving", 4).wait(30)
    wait_until(lambda: (gang.hub.get("actor:0").policy_version, gang.hub.get("actor:0").state) == (4, "serving"))
    member = gang.hub.get("actor:0")
    assert member.digest == "digest-4" and member.memory_bytes > 2**20


def test_a_second_process_of_the_same_rank_is_refused_and_ends(gang):
    assert gang.start("actor", 0).wait(60) == 3
    assert gang.group.add(0).wait(30) == [10, 11]


def test_missing_processes_are_named_with_their_pod_and_how_far_they_came(job):
    job.hub.start()
    job.start("actor", 1)
    job.wait_for("joined", "actor:1")
    with pytest.raises(DeadlineExceeded) as caught:
        job.cluster.wait_ready(["actor"], 0.1)
    text = str(caught.value)
    assert "actor:0 (pod j-actor-0: never seen)" in text and "actor:1 (pod j-actor-1: hello)" in text


@pytest.mark.parametrize(("fail", "error"), [("config", ConfigError), ("other", RemoteError)])
def test_a_failing_constructor_ends_the_wait_with_its_error(job, fail, error):
    for rank in range(2):
        job.start("actor", rank)
    WorkerGroup.of(SAMPLE, fail=fail).launch(job.cluster, name="actor")
    job.hub.start()
    with pytest.raises(error, match="model.path must exist" if fail == "config" else "KeyError"):
        job.cluster.wait_ready(["actor"], 60)


def job_with_extensions(*modules):
    """A job that names modules of the user."""
    spec = {"model": {"path": "m"}, "data": {"train": "t"}, "extensions": list(modules)}
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    )


SLOW_EXTENSION = """
import pathlib, time
while not pathlib.Path({gate!r}).exists():
    time.sleep(0.02)
"""


def test_an_extension_that_takes_its_time_to_be_imported_keeps_no_heartbeat_from_the_hub(job, tmp_path):
    (tmp_path / "slow_extension.py").write_text(SLOW_EXTENSION.format(gate=str(tmp_path / "gate")))
    job.hub.close()
    job.cluster.close()
    job.open_hub(0, job=job_with_extensions("slow_extension"))
    job.start("rollout", 0, code=tmp_path)
    group = WorkerGroup.of(SAMPLE).launch(job.cluster, name="rollout")
    job.hub.add_listeners(joined=group.construct)
    job.hub.start()
    job.wait_for("joined", "rollout:0")
    heard = job.wait_state("rollout:0", "constructing")
    job.wait_state("rollout:0", "constructing", after=heard)
    (tmp_path / "gate").touch()
    job.wait_state("rollout:0", "ready")
    assert group.add(1).wait(30) == [1]


def test_a_silent_worker_is_suspect_and_then_lost_and_its_call_fails_and_it_returns(job):
    job.hub.close()
    job.cluster.close()
    job.open_hub(0, suspect_seconds=2, lost_seconds=5)
    process = job.start("rollout", 0)
    group = WorkerGroup.of(SAMPLE).launch(job.cluster, name="rollout")
    job.hub.add_listeners(joined=group.construct)
    job.hub.start()
    job.wait_state("rollout:0", "ready")
    pending = group.nap(600)
    process.send_signal(signal.SIGSTOP)
    assert "no heartbeat" in job.wait_for("lost", "rollout:0")
    with pytest.raises(WorkerLost, match=r"nap at rollout:0 .*is lost: no heartbeat"):
        pending.wait(30)
    job.events.clear()
    process.send_signal(signal.SIGCONT)
    job.wait_state("rollout:0", "ready")
    assert group.add(1).wait(30) == [1] and group.made().wait(30)[0]["epochs"], (
        "the object was kept and told to drop its work"
    )


def test_a_killed_worker_fails_its_calls_when_its_supervisor_tells_and_a_replacement_joins(job):
    job.hub.start()
    process = job.start("rollout", 0)
    group = WorkerGroup.of(SAMPLE)
    job.wait_for("joined", "rollout:0")
    group.launch(job.cluster, name="rollout")
    pending = group.block(600)
    process.kill()
    process.wait()
    supervisor = RpcClient(job.hub.address, identity=job.identity(0, role="supervisor"))
    supervisor.call_sync("child_ended", MemberId(name="rollout:0", incarnation=(0, 0)), 137, timeout=30)
    assert job.wait_for("lost", "rollout:0") == "its process ended with code 137"
    with pytest.raises(WorkerLost):
        pending.wait(30)
    assert group.world_size == 0
    job.start("rollout", 0, incarnation="0.1")
    job.wait_for("joined", "rollout:0", (0, 1))
    group.construct(job.hub.get("rollout:0"))
    assert group.add(1).wait(30) == [1]
    supervisor.close()


def test_a_second_group_on_the_same_processes_is_constructed_when_its_launch_returns(job):
    job.cluster.sizes["actor"] = 1
    job.hub.start()
    job.start("actor", 0)
    assert WorkerGroup.of(SAMPLE, 5).launch(job.cluster, name="actor").add(0).wait(30) == [5]
    assert WorkerGroup.of(SAMPLE, 7).launch(job.cluster, name="actor").add(0).wait(30) == [7]
    with pytest.raises(ConfigError, match=r"model\.path"):
        WorkerGroup.of(SAMPLE, fail="config").launch(job.cluster, name="actor")


def test_an_old_incarnation_that_lives_on_is_fenced_and_ends_with_3(job):
    job.hub.start()
    old = job.start("rollout", 0)
    job.wait_for("joined", "rollout:0")
    job.start("rollout", 0, incarnation="1.0")
    job.wait_for("joined", "rollout:0", (1, 0))
    assert old.wait(60) == 3


def test_a_rollout_survives_the_runner_keeps_its_object_and_joins_the_next_epoch_while_the_actor_ends(job):
    rollout, actor = job.start("rollout", 0), job.start("actor", 0)
    group = WorkerGroup.of(SAMPLE, 5)
    job.hub.add_listeners(joined=lambda member: member.role == "rollout" and group.construct(member))
    group.launch(job.cluster, name="rollout")
    job.hub.start()
    job.wait_state("rollout:0", "ready")
    job.wait_for("joined", "actor:0")
    job.cluster.close()
    job.hub.close()
    job.events.clear()

    wait_until(lambda: is_free(job.port))
    job.open_hub(epoch=1)
    job.hub.add_listeners(joined=lambda member: member.role == "rollout" and group.construct(member))
    group.launch(job.cluster, name="rollout")
    job.hub.start()
    job.wait_state("rollout:0", "ready")
    made = group.made().wait(30)[0]
    assert made["pid"] == rollout.pid and made["made_at"] == (0, 2, 0) and 1 in made["epochs"]
    assert group.add(1).wait(30) == [6]
    assert actor.wait(60) == 3 and job.hub.get("actor:0") is None


def test_sigterm_drains_says_goodbye_and_ends_with_0(job):
    process = job.start("rollout", 0)
    job.hub.start()
    job.wait_for("joined", "rollout:0")
    process.terminate()
    assert process.wait(60) == 0 and "goodbye" in job.wait_for("lost", "rollout:0")


def test_a_wire_version_that_differs_is_bad_input(job, monkeypatch):
    monkeypatch.setattr("rl_core.workers.membership.WIRE_VERSION", 99)
    job.hub.start()
    assert job.start("rollout", 0).wait(60) == 2


def test_a_process_without_an_identity_says_which_variable_is_missing():
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RLJOB_")}
    ended = subprocess.run([sys.executable, "-m", "rl_core.workers.host"], env=environ, capture_output=True, text=True)
    assert ended.returncode == 2 and "environment variable RLJOB_" in ended.stderr


def wait_until(condition, seconds=120):
    """Look every 20 ms, for what arrives with heartbeats."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, json.dumps(str(condition))
        time.sleep(0.02)


def is_free(port):
    """Whether the socket of the closed hub has let go of its port (ZeroMQ closes it in the background)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
