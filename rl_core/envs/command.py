"""`Command`: a program in any language, run as a child process once per sample.

    standard input   the row, as JSON
    environment      OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, and the same with ANTHROPIC_
    standard output  what it prints, at most `OUTPUT_BYTES`
    standard error   goes to the env log; a failure quotes its last line

When the program ends, is late or prints too much, everything that it started is killed.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.envs.output import PipeCopier
from rl_core.workers import processes

OUTPUT_BYTES = 1 << 19
"""Largest number of bytes that a program may print. It is below the limit of `PipeCopier`, which therefore drops no byte."""
QUOTED_BYTES = 2048
"""Number of bytes at the end of standard error that are kept. Failures quote the last line of them."""
MARK = "RLJOB_AGENT_RUN"
"""Environment variable by which all processes of one run of a program are found."""


class _Text:
    """The standard output of a program."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.full = asyncio.Event()
        """Set when the program has printed more than `OUTPUT_BYTES`."""

    def take(self, data: bytes) -> None:
        """Store `data`. If the output would exceed its limit, set `full` instead."""
        if len(self.data) + len(data) > OUTPUT_BYTES:
            self.full.set()
        else:
            self.data += data


class _Tail:
    """Copies the standard error of a program to that of this process, and keeps its end."""

    def __init__(self) -> None:
        self._data = b""

    def take(self, data: bytes) -> None:
        """Write `data` to the standard error of this process, and keep the end."""
        os.write(sys.stderr.fileno(), data)
        self._data = (self._data + data)[-QUOTED_BYTES:]

    @property
    def last_line(self) -> str:
        """Return the last line that is not blank."""
        lines = self._data.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing on standard error")


@contextmanager
def _pipe(take: Callable[[bytes], None]) -> Iterator[int]:
    """Yield a file descriptor for the output of a program. `take` is called with the data; all of it was passed when the block ends."""
    read_end, write_end = os.pipe()
    copier = PipeCopier(read_end, take)
    try:
        yield write_end
    finally:
        os.close(write_end)
        copier.close()


async def _either(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of `waits` has ended, then cancel the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Command:
    """Runs a program. Each run has its own process group."""

    def __init__(self, arguments: Sequence[str], *, folder: str | None = None) -> None:
        """Run `arguments`, a program and its arguments, in `folder`; None = the folder with the user's code. `python` is this Python.

        Raises ConfigError for a program that does not exist.
        """
        self._folder = folder or next((path for path in sys.path[:1] if Path(path).is_dir()), None)
        self._path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        program = str(Path(self._folder or ".", arguments[0])) if "/" in arguments[0] else arguments[0]
        binary = shutil.which(program, path=self._path)
        if binary is None:
            raise ConfigError(
                f"env.command: must begin with a program, got {arguments[0]!r}, which is not found or not executable; "
                "correct it or name its interpreter"
            )
        self._arguments = [binary, *arguments[1:]]
        self._label = f"agent {' '.join(arguments)}"

    async def run(self, row: Mapping[str, Any], *, base_url: str, api_key: str, model: str) -> str:
        """Return what the program prints for `row`. Raises RolloutDataFailure if it fails or prints too much."""
        token = secrets.token_hex(16)
        environment = {**os.environ, **endpoint_variables(base_url, api_key, model), MARK: token, "PATH": self._path}
        printed, errors = _Text(), _Tail()
        with os.fdopen(os.memfd_create("row"), "w+") as rows, _pipe(printed.take) as output, _pipe(errors.take) as log:
            json.dump(row, rows, default=str)
            rows.flush()
            os.lseek(rows.fileno(), 0, os.SEEK_SET)
            process = None
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._arguments,
                    stdin=rows.fileno(),
                    stdout=output,
                    stderr=log,
                    env=environment,
                    cwd=self._folder,
                    start_new_session=True,
                )
                await _either(process.wait(), printed.full.wait())
            finally:
                if process is not None:
                    processes.kill_group(process.pid, signal.SIGKILL)
                    code = await process.wait()
                # Processes that have left the process group are found by their environment.
                await asyncio.to_thread(processes.kill_with_environment, f"{MARK}={token}")
        return self._result(code, printed, errors)

    def _result(self, code: int, printed: _Text, errors: _Tail) -> str:
        if printed.full.is_set():
            raise RolloutDataFailure(
                f"{self._label} must print at most {OUTPUT_BYTES} bytes, it printed more; log to standard error"
            )
        if code != 0:
            exit_text = f"was killed by {processes.signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            raise RolloutDataFailure(f"{self._label} must end with exit code 0, it {exit_text}: {errors.last_line}")
        return printed.data.decode(errors="replace")


def endpoint_variables(base_url: str, api_key: str, model: str) -> dict[str, str]:
    """Return the variables by which clients of OpenAI and Anthropic find the endpoint. Anthropic's adds `/v1` by itself."""
    openai = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model}
    root_url = base_url.removesuffix("/v1")
    return {**openai, "ANTHROPIC_BASE_URL": root_url, "ANTHROPIC_API_KEY": api_key, "ANTHROPIC_MODEL": model}


def last_json(printed: str, *, label: str) -> Any:
    """Return the value of the last line that is not blank. Raises RolloutDataFailure if it is not JSON."""
    line = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RolloutDataFailure(
            f'{label} must print its reward in its last line, as a number, null or {{"reward": ...}}, got {line[:200]!r}; '
            "print it, or name a function in env.options.reward"
        ) from error
