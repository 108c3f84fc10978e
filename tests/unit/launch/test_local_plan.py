"""A plan on this machine: loopback addresses, own folders, attempts; and the files that tell its processes."""

import json
import socket
from pathlib import Path

from rl_core.api.job import RLJob
from rl_core.launch.control import ControlClient
from rl_core.launch.local_plan import as_attempt, control_port, localise, under_epoch
from rl_core.launch.ports import free_ports
from rl_core.launch.registry import ProcessEntry, ProcessRegistry
from rl_core.plan.launch import Ports, build_launch_plan
from rl_core.plan.signatures import Peer
from rl_core.runner.control import ControlServer

JOB = RLJob.model_validate(
    {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "j"},
        "spec": {"model": {"path": "/m"}, "data": {"train": "t.jsonl"}, "rollout": {"replicas": 2}},
    }
)
PORTS = Ports(hub=1, channel=2, control=3, health=4, master=5)


def envs(plan):
    return {p.name: p.env for pod in plan.pods for c in pod.containers for p in c.processes}


def test_a_plan_made_for_a_cluster_runs_on_loopback_with_the_folders_of_this_run(tmp_path):
    plan = localise(
        build_launch_plan(JOB, name="j", uid="u"),
        ports=PORTS,
        curve_dir=tmp_path / "keys",
        config=tmp_path / "job.json",
    )
    found = envs(plan)
    for env in found.values():
        assert env["RLJOB_HUB"] == "tcp://127.0.0.1:1" and env["RLJOB_CHANNEL"] == "tcp://127.0.0.1:2"
        assert env["RLJOB_CURVE_DIR"] == str(tmp_path / "keys")
    assert found["actor-0"]["MASTER_ADDR"] == "127.0.0.1" and found["actor-0"]["MASTER_PORT"] == "5"
    assert found["runner"]["RLJOB_CONFIG"] == str(tmp_path / "job.json")
    assert "RLJOB_CONFIG" not in found["rollout-0"] and control_port(plan) == 3
    assert not any("RLJOB_RPC_PORT" in env for env in found.values())


def test_a_plan_made_for_loopback_keeps_its_ports_and_an_existing_job_file(tmp_path):
    config = tmp_path / "mine.json"
    config.write_text("{}")
    plan = build_launch_plan(
        JOB, name="j", uid="u", host="127.0.0.1", ports=Ports(hub=11, control=13), config=str(config)
    )
    found = envs(localise(plan, ports=PORTS, curve_dir=tmp_path, config=tmp_path / "job.json"))
    assert found["rollout-1"]["RLJOB_HUB"] == "tcp://127.0.0.1:11"
    assert found["runner"]["RLJOB_CONTROL_PORT"] == "13" and found["runner"]["RLJOB_CONFIG"] == str(config)


def test_an_epoch_and_an_attempt_change_nothing_else():
    plan = build_launch_plan(JOB, name="j", uid="u", epoch=0)
    assert under_epoch(plan, 4) == build_launch_plan(JOB, name="j", uid="u", epoch=4)
    pod = plan.pods[1]
    again = as_attempt(pod, 3)
    assert {p.env["RLJOB_INCARNATION"] for c in again.containers for p in c.processes} == {"3.0"}
    assert as_attempt(again, 0) == pod


def test_free_ports_are_different_free_and_never_handed_out_by_the_kernel():
    ports = free_ports()
    found = {ports.hub, ports.channel, ports.control, ports.health, ports.master}
    assert len(found) == 5
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in found:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
        assert port < first_ephemeral or first_ephemeral < 11_000


def entry(pid, role, **changes):
    return ProcessEntry(**({"role": role, "index": 0, "rank": None, "pid": pid, "pod": "j-env-0"} | changes))


def test_processes_json_lists_the_living_and_drops_what_an_ended_one_had_started(tmp_path):
    path = tmp_path / "processes.json"
    registry = ProcessRegistry(path)
    assert json.loads(path.read_text()) == []
    registry.add(entry(1, "supervisor"))
    registry.add(entry(2, "env", rank=0), parent=1)
    registry.add(entry(3, "env-child", rank=0), parent=2)
    registry.add(entry(4, "supervisor", pod="j-rollout-0"))
    assert json.loads(path.read_text())[0] == {"role": "env", "index": 0, "rank": 0, "pid": 2, "pod": "j-env-0"}
    registry.remove(2)
    assert [e.pid for e in registry.entries()] == [1, 4]
    registry.remove(1)
    assert [e["pid"] for e in json.loads(path.read_text())] == [4]


def test_the_control_client_signs_its_calls_and_takes_silence_for_an_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there: it must not be asked
    monkeypatch.delenv("no_proxy", raising=False)
    token = tmp_path / "control.token"
    token.write_text("right\n")
    finished, epoch = [], 2
    server = ControlServer(
        "127.0.0.1",
        0,
        peer=Peer(token="right", uid="u", epoch=2),
        status=lambda: {"step": 3},
        actions={"POST /finish": lambda _: finished.append(1) or {}},
    )
    client = ControlClient(server.port, token, uid="u", epoch=lambda: epoch)
    assert client.status() == {"step": 3} and client.finish() and finished == [1]
    epoch = 1  # one that was left behind
    assert client.status() is None and not client.finish() and finished == [1]
    epoch = 2
    token.write_text("wrong")
    assert client.status() is None and not client.finish()
    server.close()
    assert client.status() is None
