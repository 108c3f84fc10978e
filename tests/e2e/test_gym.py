"""A job on servers that speak the protocol of NeMo-Gym, which are killed in mid-run and come back."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from rl_core.cli.local_control import connect
from rl_core.samples.reader import SampleReader
from tests.e2e.harness import assert_trained_once
from tests.e2e.test_agent import TEMPLATE
from tests.gym_stand_in import AGENT


def free_ports():
    """Return two ports of loopback that nobody listens on."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def test_servers_that_are_killed_and_come_back_cost_no_group_and_no_failed_row_has_a_reward(start):
    model, head = free_ports()
    options = {"head": f"http://127.0.0.1:{head}", "modelPort": model}
    run = start(
        data={"train": "rows.jsonl", "validation": None, "chatTemplate": TEMPLATE},
        env={"type": "nemo_gym", "reward": None, "processes": 2, "options": options},
        rollout={"maxSequenceLength": 64},
        algorithm={"steps": 4},
        samples={"groups": 4},
    )
    rows = (
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"say {n:03d} "}]},
            "agent_ref": {"name": AGENT},
        }
        for n in range(64)
    )
    (run.job.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    servers = []

    def serve():
        command = [sys.executable, "-m", "tests.gym_stand_in", f"http://127.0.0.1:{model}/v1", str(head)]
        servers.append(subprocess.Popen(command))

    serve()
    try:
        run.start().at_step(1)
        servers[0].send_signal(signal.SIGSTOP)  # no row ends from now on
        run.until(lambda: connect(run.output).status()["ledger"]["groups"], "a group in flight")
        servers[0].kill()
        servers[0].wait()
        serve()
        assert run.wait() == 0, run.text + run.logs()
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert any("is run again: 1 tries failed" in log.read_text() for log in (run.output / "logs").glob("*.log"))
    assert_trained_once(run, steps=4, groups=4)
    reader = SampleReader(run.output)
    reader.refresh()
    samples = [reader.read(found) for found in reader.every("train")]
    assert len(samples) == 4 * 4 * 4
    for sample in samples:
        said = "".join(message["content"] for message in sample["messages"] if message["role"] == "assistant")
        assert sample["reward"] == pytest.approx(said.count("a") / max(len(said), 1))
