"""A real supervisor over real processes: exit codes, restarts, ends in order, nothing left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rl_core.plan.launch import ContainerPlan, PodPlan, ProcessPlan
from rl_core.transports.rpc import RpcServer
from rl_core.workers import processes
from rl_core.workers.supervisor import Supervisor

SLEEP = ("python", "-c", "import time; time.sleep(600)")


def process(name, *command, group="rollout", restart=False, **env):
    return ProcessPlan(name=name, group=group, rank=0, command=command, env=env, restart=restart)


def script(name, code, **options):
    return process(name, "python", "-c", code, **options)


def pod_of(*children, role="rollout"):
    return PodPlan(
        name=f"j-{role}-0",
        role=role,
        index=0,
        containers=(ContainerPlan(name=role, image_role=role, processes=children),),
    )


class Pod:
    """A supervisor process with the launcher's end of its socket."""

    def __init__(self, folder, plan, **environ):
        self.mark = f"TEST_POD={os.getpid()}-{time.monotonic_ns()}"
        self.log = folder / "pod.log"
        file = folder / "pod.json"
        file.write_text(plan.to_json())
        name, _, value = self.mark.partition("=")
        self.socket, theirs = socket.socketpair()
        with theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rl_core.launch.pod", str(file)],
                env={
                    **os.environ,
                    name: value,
                    "RLJOB_HEALTH_PORT": "0",
                    "RLJOB_EVENTS_FD": str(theirs.fileno()),
                    **environ,
                },
                pass_fds=(theirs.fileno(),),
                stdout=log,
                stderr=log,
            )
        self.socket.settimeout(60)
        self.events = []
        self._rest = b""

    def event(self, kind, count=1):
        """Return the `count`-th event of a kind, reading until it comes."""
        while len(found := [e for e in self.events if e["event"] == kind]) < count:
            data = self.socket.recv(65536)
            assert data, (kind, self.events, self.log.read_text())
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.events += map(json.loads, lines)
        return found[count - 1]

    def wait(self):
        code = self.process.wait(60)
        left = list(processes.with_environment(self.mark))
        assert left == [], f"processes left: {left}\n{self.log.read_text()}"
        return code

    def close(self):
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in processes.with_environment(self.mark):
            processes.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path):
    pods = []

    def begin(*children, role="rollout", **environ):
        pods.append(Pod(tmp_path, pod_of(*children, role=role), **environ))
        return pods[-1]

    yield begin
    for pod in pods:
        pod.close()


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("0", 0), ("2", 2), ("3", 3), ("4", 4), ("9", 3), ("-1", 3), ("kill", 137), ("killed oddly", 163), ("raise", 3)],
    ids=["done", "config", "infrastructure", "data", "undocumented", "255", "killed", "real time", "traceback"],
)
def test_a_childs_end_is_the_pods_end_with_a_documented_code_and_its_last_words(start, tmp_path, code, expected):
    ends = {
        "kill": "os.kill(os.getpid(), 9)",
        "killed oddly": "os.kill(os.getpid(), 35)",
        "raise": "raise ValueError('bad luck')",
    }
    end = ends.get(code, f"os._exit({code})")
    log = tmp_path / "termination-log"
    log.touch()
    child = script("actor-0", f"import os; print('last words', flush=True); {end}")
    others = [process("other", *SLEEP)] if expected else []
    pod = start(child, *others, role="actor", RLJOB_TERMINATION_LOG=str(log))
    assert pod.wait() == expected and "last words" in pod.log.read_text()
    told = log.read_text()
    assert json.loads(told.splitlines()[0])["code"] == expected and len(told) <= 4096
    if expected:
        assert "last words" in told and pod.event("exit")["code"] == expected


def test_a_restartable_child_gets_a_higher_incarnation_each_time_three_times(start):
    code = "import os; print('incarnation', os.environ['RLJOB_INCARNATION'], flush=True); os.kill(os.getpid(), 9)"
    pod = start(script("rollout-0", code, restart=True, RLJOB_INCARNATION="5.0"))
    assert pod.wait() == 137
    assert re.findall(r"incarnation (\S+)", pod.log.read_text()) == ["5.0", "5.1", "5.2", "5.3"]


def test_a_successor_starts_after_the_hub_was_told_how_its_predecessor_ended(start):
    told, answer = [], threading.Event()

    def child_ended(child, code):
        told.append((child.name, child.incarnation, code))
        answer.wait(2)

    hub = RpcServer("tcp://127.0.0.1:0", {"child_ended": child_ended}, service="hub").start()
    job = {"RLJOB_NAME": "j", "RLJOB_UID": "u", "RLJOB_ROLE": "rollout", "RLJOB_HUB": hub.address}
    pod = start(process("rollout-0", *SLEEP, restart=True, **job))
    os.kill(pod.event("started")["pid"], signal.SIGKILL)
    wait_until(lambda: told)
    pod.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        pod.event("started", 2)
    assert told == [("rollout:0", (0, 0), 137)]
    answer.set()
    pod.socket.settimeout(60)
    assert pod.event("started", 2)["pid"] != pod.event("started")["pid"]
    hub.close()


@pytest.mark.parametrize("code", [0, 2, 4])
def test_done_bad_input_and_bad_data_are_not_restarted(start, code):
    pod = start(script("env-0", f"print('started', flush=True); raise SystemExit({code})", restart=True), role="env")
    assert pod.wait() == code and pod.log.read_text().count("started") == 1


def test_a_pod_is_done_when_its_runner_is_although_others_run(start):
    pod = start(
        script("runner", "import time; time.sleep(0.2)", group="runner"),
        process("channel", *SLEEP, group="channel"),
        role="actor",
    )
    assert pod.wait() == 0


def test_sigterm_reaches_the_runner_first_and_the_others_when_it_has_ended(start):
    code = """
import os, signal, sys, time
def end(*_):
    print("{name} told", flush=True); time.sleep({seconds}); print("{name} ends", flush=True); os._exit(0)
signal.signal(signal.SIGTERM, end); print("{name} up", flush=True)
while True: time.sleep(1)
"""
    pod = start(
        script("runner", code.format(name="runner", seconds=0.5), group="runner"),
        script("actor-0", code.format(name="actor", seconds=0), group="actor"),
        role="actor",
    )
    wait_until(lambda: pod.log.read_text().count(" up") == 2)
    pod.process.terminate()
    assert pod.wait() == 0
    words = re.findall(r"(?:runner|actor) (?:told|ends)", pod.log.read_text())
    assert words == ["runner told", "runner ends", "actor told", "actor ends"]


def test_a_child_that_ignores_sigterm_is_killed_with_its_family_before_the_grace_ends(start):
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen(['sleep', '600']); subprocess.Popen(['sleep', '600'], start_new_session=True);"
        "print('deaf', flush=True); time.sleep(600)"
    )
    pod = start(script("env-0", code, restart=True), role="env", RLJOB_GRACE_SECONDS="1")
    wait_until(lambda: "deaf" in pod.log.read_text())
    pod.process.terminate()
    assert pod.wait() == 137


def test_a_second_signal_kills_at_once(start):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    pod = start(script("env-0", code), role="env", RLJOB_GRACE_SECONDS="3000")
    wait_until(lambda: "deaf" in pod.log.read_text())
    pod.process.terminate()
    wait_until(lambda: "asked to end" in pod.log.read_text())
    pod.process.terminate()
    assert pod.wait() == 3


def test_what_a_killed_child_left_in_other_sessions_dies_with_it_while_the_pod_lives(start):
    code = "import subprocess, time; print('stray', subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True); time.sleep(600)"
    pod = start(script("env-0", code, restart=True), role="env")
    wait_until(lambda: "stray" in pod.log.read_text())
    stray = int(re.search(r"stray (\d+)", pod.log.read_text())[1])
    os.kill(pod.event("started")["pid"], signal.SIGKILL)
    assert pod.event("ended")["code"] == 137 and pod.event("started", 2)["name"] == "env-0"
    wait_until(lambda: not Path(f"/proc/{stray}").exists())
    assert pod.process.poll() is None


def test_orphans_of_living_children_are_reaped_and_never_stay_zombies(start):
    code = "import subprocess, time; subprocess.run(['sh', '-c', 'sleep 0.3 & echo orphan $!'], check=True); time.sleep(600)"
    pod = start(script("env-0", code), role="env")
    wait_until(lambda: "orphan" in pod.log.read_text())
    orphan = int(re.search(r"orphan (\d+)", pod.log.read_text())[1])
    wait_until(lambda: not Path(f"/proc/{orphan}").exists())


def test_nothing_is_left_when_the_launcher_goes_away(start):
    code = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); print('up', flush=True); time.sleep(600)"
    pod = start(script("rollout-0", code, restart=True))
    wait_until(lambda: "up" in pod.log.read_text())
    pod.socket.close()
    assert pod.wait() == 3


def test_children_die_with_a_supervisor_that_is_killed(start):
    pod = start(process("rollout-0", *SLEEP, restart=True))
    child = pod.event("started")["pid"]
    pod.process.kill()
    pod.process.wait()
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_a_command_that_does_not_exist_is_an_infrastructure_failure_that_names_it(start):
    pod = start(process("rollout-0", "/no/such/program", restart=True))
    assert pod.wait() == 3 and "/no/such/program" in pod.event("exit")["reason"]


def test_a_health_port_in_use_is_bad_input_that_names_the_port(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        pod = start(process("rollout-0", *SLEEP), RLJOB_HEALTH_PORT=str(port), RLJOB_HEALTH_HOST="127.0.0.1")
        assert pod.wait() == 2 and f"health port {port}" in pod.event("exit")["reason"]


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_probes_answer_over_http_and_follow_what_children_tell(start, tmp_path):
    serve = tmp_path / "serve"
    code = (
        "import os, time; from rl_core.observability import events\n"
        f"while not os.path.exists({str(serve)!r}): time.sleep(0.02)\n"
        "events.report('alive', state='serving'); time.sleep(600)"
    )
    pod = start(script("rollout-0", code, restart=True))
    port = pod.event("health")["port"]
    assert get(port, "/healthz") == (200, "ok\n") and get(port, "/nothing")[0] == 404
    pod.event("started")
    assert get(port, "/readyz") == (503, "waiting for rollout-0: starting\n")
    serve.touch()
    wait_until(lambda: get(port, "/readyz") == (200, "ready\n"))
    assert 'rljob_process_up{process="rollout-0",pod="j-rollout-0"} 1' in get(port, "/metrics")[1]


def test_output_of_several_children_is_told_apart(start):
    pod = start(script("a", "print('one\\ntwo')"), script("b", "print('three', end='')"), role="actor")
    assert pod.wait() == 0
    assert sorted(line for line in pod.log.read_text().splitlines() if line.startswith("[")) == [
        "[a] one",
        "[a] two",
        "[b] three",
    ]


def test_a_supervisor_in_this_process_leaves_foreign_children_alone():
    foreign = subprocess.Popen(["sleep", "600"])
    try:
        supervisor = Supervisor(
            pod_of(script("a", "raise SystemExit(4)"), process("b", *SLEEP)), health_port=0, host="127.0.0.1"
        )
        assert supervisor.run() == 4 and supervisor.reason == "a ended with code 4"
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()
        processes.adopt_orphans(False)


def test_a_supervisor_stays_small_and_never_loads_heavy_libraries(start):
    pod = start(process("rollout-0", *SLEEP))
    pod.event("started")
    maps = Path(f"/proc/{pod.process.pid}/maps").read_text()
    assert "torch" not in maps and "numpy" not in maps and "zmq" not in maps and "pydantic" not in maps
    assert processes.memory_bytes(pod.process.pid) < 60e6
