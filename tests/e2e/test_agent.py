"""A job whose episodes a program of the user drives through the OpenAI endpoint of its rollouts, with the unmodified `openai` client."""

import json
from collections import Counter

import numpy as np

from rl_core.cli.local_control import connect
from rl_core.messages.samples import TRAINED
from rl_core.samples.lines import array_of
from rl_core.samples.reader import SampleReader
from tests.e2e.harness import assert_trained_once

AGENT = """
import json, pathlib, secrets, time

from openai import OpenAI

FOLDER = pathlib.Path(__file__).parent


def run(row, base_url, api_key, model):
    messages, texts, calls = list(row["prompt"]), [], []
    start = secrets.token_hex(8)
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for turn in range(4):
            if turn == 3:
                hold(row)
            choice = client.chat.completions.create(
                model=model, messages=messages, max_tokens=6, logprobs=True, extra_body={"return_token_ids": True}
            ).choices[0]
            calls.append([choice.token_ids, [entry.logprob for entry in choice.logprobs.content]])
            texts.append(choice.message.content or "")
            messages += [choice.message, {"role": "user", "content": "go "}]
    (FOLDER / "runs" / start).write_text(json.dumps([row["number"], calls]))
    text = "".join(texts)
    return {"reward": text.count("a") / max(len(text), 1), "parts": {"length": float(len(text))}}


def hold(row):
    # The first conversation that comes here waits, three turns in, until the test says `go`.
    held, go = FOLDER / "held", FOLDER / "go"
    if go.exists():
        return
    try:
        with held.open("x") as file:
            file.write(str(row["number"]))
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
    "algorithm": {"steps": 3},
}


def test_a_program_three_turns_in_goes_on_when_its_rollout_is_killed_and_trains_what_was_sampled(start):
    run = start(**SPEC)
    folder = run.job.parent
    rows = ({"number": n, "prompt": [{"role": "user", "content": f"say {n:03d} "}]} for n in range(64))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "program.py").write_text(AGENT)
    (folder / "runs").mkdir()
    run.start()
    held = folder / "held"
    number = run.until(lambda: held.exists() and held.read_text(), "a conversation between two calls")
    groups = connect(run.output).status()["ledger"]["groups"]
    [owner] = [group["owner"] for group in groups if group["id"].endswith(f"-{number}")]
    run.kill(role="rollout", index=int(owner.split()[0].partition(":")[2]))
    (folder / "go").touch()
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=3, groups=4)
    lines = run.lines("metrics.jsonl")
    assert [line["rollout/turns_per_sample/mean"] for line in lines] == [4.0] * 3
    assert all(line["rollout/branches"] == 0 for line in lines)
    assert lines[-1]["failures_total/rollout/lost"] == 1 and lines[-1]["epoch"] == 0
    assert lines[-1]["env/sessions_moved_total"] >= 1
    # What each program saw is what was trained, token for token, and no program ran twice.
    seen = [json.loads(path.read_text()) for path in (folder / "runs").iterdir()]
    reader = SampleReader(run.output)
    reader.refresh()
    trained = [tokens_of(reader.read(found)) for found in reader.every("train")]
    assert Counter(trained) == Counter(tokens_seen(calls) for _, calls in seen) and len(trained) == 3 * 4 * 4
    assert str(number) in [str(row) for row, _ in seen]


def tokens_of(sample):
    """Return the trained tokens of a sample and the log-probabilities with which the engine sampled them."""
    chosen = array_of(sample, "mask") == TRAINED
    return tuple(array_of(sample, "ids")[chosen].tolist()), tuple(array_of(sample, "engine")[chosen].tolist())


def tokens_seen(calls):
    """Return the same of the answers that a program got."""
    ids = tuple(token for tokens, _ in calls for token in tokens)
    logprobs = np.array([value for _, values in calls for value in values], np.float32)
    return ids, tuple(logprobs.tolist())
