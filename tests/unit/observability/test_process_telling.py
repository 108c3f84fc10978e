"""What processes write: log lines that say who and which version, event lines for the parent."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest

from rl_core.api.identity import Identity
from rl_core.observability import logging as process_log

IDENTITY = Identity.from_env(
    {"RLJOB_NAME": "j", "RLJOB_UID": "u", "RLJOB_ROLE": "rollout", "RANK": "1", "RLJOB_EPOCH": "2"}
)


@pytest.fixture
def written():
    root = logging.getLogger()
    handlers, level, context = root.handlers[:], root.level, dict(vars(process_log._Context))
    process_log.set_policy_version(None)
    stream = io.StringIO()
    yield stream
    root.handlers[:], root.level = handlers, level
    for name in ("role", "rank", "epoch", "policy_version"):
        setattr(process_log._Context, name, context[name])


def test_a_line_says_who_wrote_it_and_at_which_version(written):
    process_log.configure_logging(IDENTITY, stream=written)
    logging.getLogger("rl_core.x").info("took %d tokens", 5)
    process_log.set_policy_version(7)
    logging.getLogger("rl_core.x").warning("late")
    first, second = written.getvalue().splitlines()
    assert first.endswith(" I rollout:1 rl_core.x: took 5 tokens")
    assert second.endswith(" W rollout:1 v7 rl_core.x: late")


def test_json_lines_carry_the_same_as_fields(written, monkeypatch):
    monkeypatch.setenv("RLJOB_LOG_FORMAT", "json")
    process_log.configure_logging(IDENTITY, stream=written)
    process_log.set_policy_version(7)
    process_log.set_epoch(3)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("rl_core.x").exception("failed")
    line = json.loads(written.getvalue())
    assert line["traceback"].endswith("ValueError: no") and line.pop("traceback") and line.pop("time") > 0
    assert line == {
        "level": "ERROR", "role": "rollout", "rank": 1, "epoch": 3, "policy_version": 7, "logger": "rl_core.x", "message": "failed",
    }  # fmt: skip


def test_the_level_comes_from_the_environment(written, monkeypatch):
    monkeypatch.setenv("RLJOB_LOG_LEVEL", "warning")
    process_log.configure_logging(role="supervisor", stream=written)
    logging.getLogger("rl_core.x").info("quiet")
    assert written.getvalue() == ""


def run_reporter(code, fd):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "RLJOB_EVENTS_FD": str(fd)}, pass_fds=(fd,), check=True
    )


def test_events_reach_the_parent_and_the_variable_does_not_reach_grandchildren():
    read, write = os.pipe()
    run_reporter(
        "from rl_core.observability import events; import os;"
        "events.report('started', pid=5); events.report('alive', state='ready', seen='RLJOB_EVENTS_FD' in os.environ)",
        write,
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        assert [json.loads(line) for line in pipe] == [
            {"event": "started", "pid": 5},
            {"event": "alive", "state": "ready", "seen": False},
        ]


def test_a_parent_that_does_not_read_or_is_gone_never_blocks_the_reporter():
    read, write = os.pipe()
    code = "from rl_core.observability import events\nfor _ in range(5000): events.report('alive', state='x' * 100)"
    run_reporter(code, write)
    os.close(read)
    run_reporter(code, write)
    os.close(write)
