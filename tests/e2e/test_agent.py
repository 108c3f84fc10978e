"""A job whose episodes a program of the user drives through the OpenAI endpoint of its rollout, with the unmodified `openai` client."""

import json
import os
import signal

import psutil

from tests.e2e.harness import assert_trained_once

AGENT = """
import pathlib, time

from openai import OpenAI

FOLDER = pathlib.Path(__file__).parent


def run(row, base_url, api_key, model):
    messages, texts = list(row["prompt"]), []
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for turn in range(2):
            reply = client.chat.completions.create(model=model, messages=messages, max_tokens=8).choices[0].message
            texts.append(reply.content or "")
            messages += [reply, {"role": "user", "content": "again "}]
            if turn == 0:
                hold(base_url)
    text = "".join(texts)
    return {"reward": text.count("a") / max(len(text), 1), "parts": {"length": float(len(text))}}


def hold(base_url):
    # Wait in the middle of the first conversation that comes here after the file `arm` exists, until the test says `go`.
    held, go = FOLDER / "held", FOLDER / "go"
    if go.exists() or not (FOLDER / "arm").exists():
        return
    try:
        with held.open("x") as file:
            file.write(base_url)
    except FileExistsError:
        return
    while not go.exists():
        time.sleep(0.05)
"""
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
SPEC = {
    "data": {"train": "rows.jsonl", "validation": None, "chatTemplate": TEMPLATE},
    "env": {"type": "agent", "agent": "program:run", "reward": None, "processes": 2},
    "rollout": {"replicas": 2, "maxSequenceLength": 64},
    "algorithm": {"steps": 4},
}


def test_a_conversation_whose_rollout_is_killed_is_held_again_and_every_group_is_trained_once(start):
    run = start(**SPEC)
    folder = run.job.parent
    rows = ({"prompt": [{"role": "user", "content": f"say {number:03d} "}]} for number in range(64))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "program.py").write_text(AGENT)
    (folder / "arm").touch()
    run.start()
    held = folder / "held"
    address = run.until(lambda: held.exists() and held.read_text(), "a conversation between two calls")
    port = int(address.rsplit(":", 1)[1].split("/")[0])
    (pid,) = [entry["pid"] for entry in run.processes(role="rollout") if port in listening(entry["pid"])]
    os.kill(pid, signal.SIGKILL)
    (folder / "go").touch()
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=4, groups=4)
    lines = run.lines("metrics.jsonl")
    assert [line["rollout/turns_per_sample/mean"] for line in lines] == [2.0] * 4
    assert all(line["rollout/branches"] == 0 for line in lines)
    assert lines[-1]["failures_total/rollout/lost"] == 1 and lines[-1]["epoch"] == 0


def listening(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    return {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN}
