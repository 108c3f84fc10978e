"""Processes that do not compute stay small: no torch, no transformers, no cluster client at import."""

import subprocess
import sys

import pytest

LEAN = [
    "rl_core.api.job",
    "rl_core.api.records",
    "rl_core.plan.launch",
    "rl_core.plan.placement",
    "rl_core.plan.capacity",
    "rl_core.transports.rpc",
    "rl_core.channel.server",
    "rl_core.workers.host",
    "rl_core.workers.group",
    "rl_core.workers.supervisor",
    "rl_core.runner.__main__",
    "rl_core.envs.worker",
    "rl_core.envs.child",
    "rl_core.envs.confined",
    "rl_core.launch.local",
    "rl_core.launch.cluster",
    "rl_core.cli.main",
    "rl_core.cli.run",
    "rljob_operator",
]


@pytest.mark.parametrize("module", LEAN)
def test_importing_it_brings_no_heavy_stack(module):
    code = f"import sys, {module}; bad = {{'torch', 'transformers', 'sglang', 'kubernetes', 'kopf', 'ray'}} & set(sys.modules); sys.exit(','.join(bad) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_face_for_scripts_loads_neither_arrays_nor_the_schema_nor_its_library():
    """A script without a job may have no use for them, and they take longer to load than all else of the project."""
    code = (
        "import sys; from rl_core import Channel, Cluster, Worker; "
        "bad = {'torch', 'numpy', 'crc32c', 'transformers', 'tokenizers', 'jinja2', 'pydantic', 'kubernetes', 'aiohttp', 'rl_core.api.base', 'rl_core.api.job'}"
        " & set(sys.modules); sys.exit(','.join(sorted(bad)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
