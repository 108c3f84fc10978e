"""Parts of the SGLang worker that need no engine: a row put together from pieces, and what the engine's tensors must hold."""

import concurrent.futures
import contextlib
import os
import queue
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from rl_core.api.errors import DeadlineExceeded, GenerationUnavailable, InfrastructureError, RolloutDataFailure
from rl_core.api.settings import DeadlinesSpec
from rl_core.messages.engine import EngineOutput, EngineSettings
from rl_core.rollouts.hf.stopping import StopStrings
from rl_core.rollouts.rows import Row
from rl_core.rollouts.sampling import SamplingParams
from rl_core.rollouts.sglang import engine as engine_module
from rl_core.rollouts.sglang import process as process_module
from rl_core.rollouts.sglang import setup
from rl_core.rollouts.sglang.child.stages import STAGE
from rl_core.rollouts.sglang.engine import SGLangEngine
from rl_core.rollouts.sglang.row_progress import MAX_RESUMPTIONS, RowProgress
from rl_core.transports import tokens


class Letters:
    """Decodes every id to one letter."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(96 + token) for token in ids)


LETTERS = Letters()


def running(max_seq_len=32, **params):
    row = Row(key="k", prompt=[5, 6], params=SamplingParams(**{"max_new_tokens": 10, **params}), seed=1)
    return RowProgress(1, row, lambda results: None, max_seq_len, frozenset({0}), StopStrings(LETTERS))


def output(ids, reason, version="3", **more):
    versions = [(0, len(ids), version)] if ids else []
    return EngineOutput(key=1, ids=ids, logprobs=[-0.5] * len(ids), reason=reason, versions=versions, **more)


def test_an_aborted_row_goes_on_from_its_tokens_with_what_is_left_and_keeps_every_piece():
    row = running()
    assert row.append(output([1, 2], "abort", "3")) is None
    assert row.request().ids == [5, 6, 1, 2] and row.request().sampling["max_new_tokens"] == 8
    assert row.append(output([], "abort")) is None  # aborted before a token of its own
    assert row.append(output([4], "abort", "3")) is None
    result = row.append(output([7, 0], "stop", "4"))
    assert result.ids == [1, 2, 4, 7, 0] and result.logprobs == [-0.5] * 5 and result.finish_reason == "stop"
    assert result.versions == [(0, 3, 3), (3, 5, 4)]


def test_a_row_that_is_aborted_at_its_limit_is_done():
    assert running(max_new_tokens=2).append(output([1, 2], "abort")).finish_reason == "length"
    assert running(max_seq_len=4).append(output([1, 2], "abort")).finish_reason == "seq_limit"


@pytest.mark.parametrize("parts", [([1, 2], [3, 4, 5]), ([1], [2], [3, 4, 5]), ([1, 2], [], [3, 4])])
def test_a_stop_string_that_an_abort_splits_ends_the_row(parts):
    row = running(stop_strings=("bc",))
    *aborted, last = parts
    assert [row.append(output(ids, "abort", "3")) for ids in aborted] == [None] * len(aborted)
    result = row.append(output(last, "length", "4"))
    assert (result.ids, result.finish_reason, len(result.logprobs)) == ([1, 2, 3], "stop", 3)
    assert result.versions[-1][1] == 3


def test_a_stop_string_that_an_abort_splits_ends_the_row_also_when_it_is_aborted_again():
    row = running(stop_strings=("bc",))
    assert row.append(output([1, 2], "abort")) is None
    assert row.append(output([3, 4], "abort")).ids == [1, 2, 3]
    other = running(stop_strings=("bc",))
    assert other.append(output([1, 2], "abort")) is None
    assert other.append(output([4, 3], "abort")) is None, "b and c are apart"


def test_a_row_is_not_resumed_for_ever():
    row = running(max_new_tokens=20)
    for _ in range(MAX_RESUMPTIONS):
        assert row.append(output([1], "abort")) is None
    assert isinstance(row.append(output([1], "abort")), GenerationUnavailable)


def test_failures_are_typed_by_whose_fault_they_are_and_tokens_of_no_version_are_one():
    assert isinstance(running().append(output([], "error", data_fault=True)), RolloutDataFailure)
    assert isinstance(running().append(output([], "error")), GenerationUnavailable)
    assert isinstance(running().append(output([1], "stop", "default")), GenerationUnavailable)


def test_a_row_asks_for_the_whole_vocabulary_and_stops_at_the_ids_of_the_model_and_its_own():
    sampling = running(stop_token_ids=(9,), stop_strings=("x",), temperature=0.7).request().sampling
    assert sampling == {
        "temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 10, "no_stop_trim": True, "ignore_eos": False,
        "stop_token_ids": [0, 9], "stop": ["x"],
    }  # fmt: skip
    assert running(max_new_tokens=0).empty.finish_reason == "length" and running().empty is None


def test_a_keeper_that_fails_in_any_way_is_heard_by_who_waits_for_the_engine(monkeypatch):
    def fail(*arguments):
        raise ValueError("filedescriptor out of range")

    monkeypatch.setattr(engine_module, "EngineProcess", fail)
    source = EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody")
    engine = SGLangEngine(
        source,
        environ={},
        memory=0,
        start_seconds=60.0,
        max_seq_len=8,
        vocab_size=8,
        tokenizer=LETTERS,
        silence_seconds=60.0,
    )
    told = []
    engine.watch(lambda reason: None, told.append)
    with pytest.raises(InfrastructureError, match="ValueError: filedescriptor out of range"):
        engine.start()
    assert isinstance(told[0], InfrastructureError)


class Dying:
    """An engine's process that is up and ends at once."""

    def __init__(self, *arguments):
        self.pids, self.asked = [1], threading.Event()

    def await_ready(self, seconds, cancelled):
        pass

    def receive(self, seconds, message_seconds):
        raise EOFError

    def send(self, message):
        self.asked.set()

    def how_it_ended(self):
        return "was killed by SIGKILL"

    def kill(self):
        pass


class DyingWhenAsked(Dying):
    """One that ends with the first row."""

    def receive(self, seconds, message_seconds):
        if self.asked.wait(seconds):
            raise EOFError


def test_a_child_that_cannot_be_killed_is_reported_to_who_waits_for_the_engine(monkeypatch):
    class Immortal(Dying):
        def kill(self):
            raise InfrastructureError("the engine's process 1 must end within 10 s of SIGKILL")

    told = concurrent.futures.Future()
    monkeypatch.setattr(engine_module, "EngineProcess", Immortal)
    source = EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody")
    engine = SGLangEngine(
        source,
        environ={},
        memory=0,
        start_seconds=60.0,
        max_seq_len=8,
        vocab_size=8,
        tokenizer=LETTERS,
        silence_seconds=60.0,
    )
    engine.watch(lambda reason: None, told.set_result)
    with contextlib.suppress(InfrastructureError):
        engine.start()
    assert "must end within 10 s of SIGKILL" in str(told.result(60))
    with pytest.raises(InfrastructureError, match="must end within 10 s"):
        engine.await_ready(60)


def test_a_child_that_outlives_the_end_of_its_engine_does_not_end_the_worker(monkeypatch):
    """The callback ends the process of a worker with exit code 3, which must not happen to one that ends anyway."""

    class Immortal(Dying):
        def await_ready(self, seconds, closed):
            while not closed():
                time.sleep(0.01)
            raise InfrastructureError("the engine was closed")

        def kill(self):
            raise InfrastructureError("the engine's process 1 must end within 10 s of SIGKILL")

    reports = []
    monkeypatch.setattr(engine_module, "EngineProcess", Immortal)
    engine = SGLangEngine(
        EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody"),
        environ={},
        memory=0,
        start_seconds=0.1,
        max_seq_len=8,
        vocab_size=8,
        tokenizer=LETTERS,
        silence_seconds=60.0,
    )
    engine.watch(lambda reason: None, reports.append)
    with contextlib.suppress(DeadlineExceeded):
        engine.start()
    engine.close()
    with pytest.raises(InfrastructureError, match="must end within 10 s"):
        engine.await_ready(60)
    assert reports == []


def test_a_process_that_outlives_its_kill_is_an_infrastructure_error(monkeypatch):
    """The stand-in for a process that hangs in the kernel: SIGKILL is not sent, and the child sleeps."""
    near, far = socket.socketpair()
    monkeypatch.setattr(process_module.processes, "kill_group", lambda pid, number: None)
    monkeypatch.setattr(process_module, "REAP_SECONDS", 0.01)
    monkeypatch.setattr(process_module.sys, "executable", "/bin/sleep")
    child = subprocess.Popen(["/bin/sleep", "600"])
    monkeypatch.setattr(
        process_module.subprocess,
        "Popen",
        lambda *a, **k: SimpleNamespace(pid=child.pid, wait=child.wait, stderr=near.makefile("rb")),
    )
    try:
        engine = process_module.EngineProcess(
            EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody"), {}, 0
        )
        far.close()
        with pytest.raises(InfrastructureError, match="must end within 0.01 s of SIGKILL"):
            engine.kill()
    finally:
        child.kill()
        child.wait()


def test_that_an_engine_is_lost_is_told_before_its_rows_fail(monkeypatch):
    told, ended = [], threading.Event()
    monkeypatch.setattr(engine_module, "EngineProcess", DyingWhenAsked)
    source = EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody")
    engine = SGLangEngine(
        source,
        environ={},
        memory=0,
        start_seconds=60.0,
        max_seq_len=8,
        vocab_size=8,
        tokenizer=LETTERS,
        silence_seconds=60.0,
        restarts=False,
    )
    engine.watch(told.append, lambda error: ended.set())
    engine.start()
    row = Row(key="k", prompt=[5], params=SamplingParams(), seed=1)
    engine.submit([row], lambda results: told.append(results[0][1]))
    assert ended.wait(60)
    assert told[0] == "its process was killed by SIGKILL" and isinstance(told[1], GenerationUnavailable)
    with pytest.raises(InfrastructureError, match="may not start here again"):
        engine.submit([row], told.append)


@pytest.mark.parametrize(
    ("restarts", "started", "words"), [(False, 1, "may not start here again"), (True, 4, "died 4 times")]
)
def test_an_engine_that_shares_its_device_is_not_started_again_by_its_worker(monkeypatch, restarts, started, words):
    starts, told = [], concurrent.futures.Future()
    monkeypatch.setattr(engine_module, "EngineProcess", lambda *arguments: starts.append(1) or Dying())
    source = EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody")
    engine = SGLangEngine(
        source,
        environ={},
        memory=0,
        start_seconds=60.0,
        max_seq_len=8,
        vocab_size=8,
        tokenizer=LETTERS,
        silence_seconds=60.0,
        restarts=restarts,
    )
    engine.watch(lambda reason: None, lambda error: error and told.set_result(error))
    with contextlib.suppress(InfrastructureError):
        engine.start()
    assert words in str(told.result(60)) and len(starts) == started


def test_the_folder_of_a_worker_that_was_killed_is_removed_by_the_next_one_and_that_of_a_living_one_stays(
    tmp_path, monkeypatch
):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    living = setup.ModelFolder({"config.json": b"{}"})
    killed = setup.ModelFolder({"config.json": b"{}"})
    killed._lock.close()  # the kernel unlocks what a dead process held
    (tmp_path / "tmp" / f"{setup.PREFIX}other").mkdir()
    setup.ModelFolder({}).close()
    assert {path.name for path in (tmp_path / "tmp").iterdir()} == {living.path.name, f"{setup.PREFIX}other"}
    assert (living.path / "config.json").read_bytes() == b"{}"
    living.close()
    assert not living.path.exists()


def test_what_the_start_of_an_engine_does_is_told_by_its_processes(tmp_path, monkeypatch):
    """The stand-in writes what the child and a scheduler write, then sleeps."""
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho a warning >&2\necho '{STAGE}the process imports SGLang' >&2\n"
        f"echo '{STAGE}warm-up: the first tokens' >&2\nexec sleep 600\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(process_module.sys, "executable", str(program))
    memory, stages = os.memfd_create("weights"), queue.SimpleQueue()
    try:
        engine = process_module.EngineProcess(
            EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody"),
            {"PATH": os.environ["PATH"]},
            memory,
            stages.put,
        )
        assert [stages.get(timeout=60) for _ in range(2)] == ["the process imports SGLang", "warm-up: the first tokens"]
        engine.kill()
    finally:
        os.close(memory)


def test_a_killed_engine_leaves_no_file_in_memory(monkeypatch):
    """The stand-in sleeps; its file is there as while a scheduler starts."""
    folder = setup.ModelFolder({})
    file = tokens.DIRECTORY / f"sglang_loads_{folder.owner}_0123.shm"
    monkeypatch.setattr(process_module.sys, "executable", "/bin/true")
    memory = os.memfd_create("weights")
    try:
        engine = process_module.EngineProcess(
            EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner=folder.owner), {}, memory
        )
        file.touch()
        engine.kill()
        assert not file.exists()
    finally:
        os.close(memory)
        folder.close()
        file.unlink(missing_ok=True)


class Clock:
    """Time that passes while a stand-in of the engine's process is waited for."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (engine_module, process_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


def read_while_silent(monkeypatch, seconds):
    """Return why a keeper with the default deadline gives up an engine that is silent for `seconds` and then closed, or ends after it."""
    clock = Clock(monkeypatch)
    silence = DeadlinesSpec().engine_silence

    class Compiling(Dying):
        def receive(self, _, message_seconds):
            clock.now += 10.0
            if clock.now > seconds:
                raise EOFError

    monkeypatch.setattr(engine_module, "EngineProcess", Compiling)
    source = EngineSettings(options={}, architecture="Qwen2ForCausalLM", owner="nobody")
    engine = SGLangEngine(
        source,
        environ={},
        memory=0,
        start_seconds=60.0,
        max_seq_len=8,
        vocab_size=8,
        tokenizer=LETTERS,
        silence_seconds=silence,
    )
    return engine._read(Compiling())


def test_an_engine_that_compiles_for_three_minutes_is_kept_and_its_silence_is_logged(monkeypatch, caplog):
    assert read_while_silent(monkeypatch, 180.0) == "its process was killed by SIGKILL"
    logged = [record for record in caplog.records if "may be compiling; it is replaced after 300 s" in record.message]
    assert 4 <= len(logged) <= 5


def test_an_engine_that_answers_nothing_for_longer_is_replaced(monkeypatch):
    assert read_while_silent(monkeypatch, 10_000.0) == (
        "its process 1 has answered nothing for 310 s (runtime.deadlines.engineSilence)"
    )


def test_what_an_engine_writes_is_logged_while_it_starts(monkeypatch, caplog):
    clock = Clock(monkeypatch)
    process = process_module.EngineProcess.__new__(process_module.EngineProcess)
    process._last_line = "compiling kernel 3 of 9"

    def receive(seconds, message_seconds):
        clock.now += 10.0

    process.receive = receive
    with caplog.at_level("INFO"), pytest.raises(InfrastructureError, match=r"within 180 s.*deadlines\.waitReady"):
        process.await_ready(180.0, lambda: False)
    assert "starting for 120 s of at most 180 s; its last output: compiling kernel 3 of 9" in caplog.text
