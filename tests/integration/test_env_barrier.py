"""User code that tries to get at keys, the token, and the memory of the job's other processes. Each try must fail."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from rl_core.api.env import EnvSpec
from rl_core.envs.barrier import confine
from rl_core.envs.pool import EnvPool
from rl_core.envs.source import env_source
from rl_core.messages.envs import EnvRow

TRIES = '''
import ctypes, glob, json, os, pathlib, resource, subprocess

libc = ctypes.CDLL(None, use_errno=True)
SECRET = pathlib.Path(os.environ["RLJOB_OUTPUT"]) / ".rljob/keys/runner.secret"
TOKEN = SECRET.with_name("control.token")
PARENT = os.getppid()

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def read_memory():
    """The parent's, at an address of ours: both run the same program."""
    class Span(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    room = ctypes.create_string_buffer(8)
    here, there = Span(ctypes.addressof(room), 8), Span(id(type), 8)
    return checked(libc.process_vm_readv(PARENT, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))

def run(command):
    return subprocess.run(command, shell=True, check=True, capture_output=True).stdout

def unhide():
    """As root of one more user namespace."""
    checked(libc.umount(bytes(SECRET.parent.parent)))
    return SECRET.read_text()

TRIES = {
    "read a key": lambda: SECRET.read_text(),
    "read the token": lambda: TOKEN.read_text(),
    "read the parent's environment": lambda: open(f"/proc/{PARENT}/environ", "rb").read(),
    "read the parent's memory": lambda: open(f"/proc/{PARENT}/mem", "rb"),
    "read the parent's memory by address": read_memory,
    "open what the parent has open": lambda: [os.open(path, os.O_RDONLY) for path in glob.glob(f"/proc/{PARENT}/fd/*")],
    "go through the parent's root": lambda: open(f"/proc/{PARENT}/root{SECRET}").read(),
    # PTRACE_SEIZE: attaching would stop the test itself
    "trace the parent": lambda: checked(libc.ptrace(0x4206, PARENT, 0, 0)),
    "enter the parent's mounts": lambda: checked(libc.setns(os.open(f"/proc/{PARENT}/ns/mnt", os.O_RDONLY), 0)),
    "take the cover off": unhide,
    "take the cover off as another root": lambda: run(f"unshare -Urm sh -c 'umount {SECRET.parent.parent}; cat {SECRET}'"),
    "read shared memory": lambda: open("/dev/shm/" + os.environ["SEGMENT"], "rb").read(),
    "have memory without bound": lambda: 1 / (resource.getrlimit(resource.RLIMIT_DATA)[1] == resource.RLIM_INFINITY),
}

def score(prompts, completions, **columns):
    done = []
    for name, attempt in TRIES.items():
        try:
            attempt()
        except (OSError, subprocess.CalledProcessError, ZeroDivisionError):
            continue
        done.append(name)
    pathlib.Path(os.environ["FOUND"]).write_text(json.dumps(done))
    return [1.0] * len(completions)
'''


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """A pod's keys, output folder and shared memory; returns what the tries that succeeded are called."""
    folder = tmp_path / "out/.rljob/keys"
    folder.mkdir(parents=True)
    for name in ("runner.secret", "control.token"):
        (folder / name).write_text("secret")
    (tmp_path / "tries.py").write_text(TRIES)
    segment = Path(f"/dev/shm/rljob-barrier-{os.getpid()}")
    segment.write_text("weights")
    for name, value in {
        "RLJOB_OUTPUT": tmp_path / "out",
        "RLJOB_CURVE_DIR": folder,
        "SEGMENT": segment.name,
        "FOUND": tmp_path / "found",
    }.items():
        monkeypatch.setenv(name, str(value))

    def done(**limits):
        spec = EnvSpec.model_validate({"type": "reward", "reward": "tries:score", "options": {"limits": limits}})
        asyncio.run(step(env_source(spec, search_path=[str(tmp_path)])))
        return json.loads((tmp_path / "found").read_text())

    yield done
    segment.unlink()


async def step(source):
    pool = EnvPool(source, step_deadline=120.0, start_deadline=120.0)
    await pool.start()
    try:
        (answer,) = await pool.step_rows(
            [EnvRow(key="", task_name=None, messages=[{"role": "user", "content": "?"}], metadata={})]
        )
        return answer
    finally:
        await pool.close()


@pytest.fixture
def kernel_allows(tmp_path):
    trial = os.fork()
    if trial == 0:
        os._exit(1 if confine([str(tmp_path)]) else 0)
    if os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]):
        pytest.skip("this kernel allows no user namespaces; user code then runs without a barrier and its log says so")


def test_user_code_gets_at_no_key_no_token_and_no_memory_of_others(pod, kernel_allows):
    assert pod() == []


def test_without_the_barrier_it_would(pod):
    """So the tries are real ones; only what is bounded without it stays so."""
    assert {"read a key", "read the token", "read the parent's environment", "read shared memory"} <= set(
        pod(barrier=False)
    )
