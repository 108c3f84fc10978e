"""Freed memory is used again instead of being given back and faulted in anew."""

import resource
import subprocess
import sys

CODE = """
import resource, sys
from rl_core.cpu.memory import keep_freed_memory
assert keep_freed_memory() or sys.exit(3)
for _ in range(3): bytearray(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): bytearray(64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_block_freed_and_asked_for_again_costs_no_page_faults():
    done = subprocess.run([sys.executable, "-c", CODE], check=False, capture_output=True, text=True)
    if done.returncode == 3:
        return  # a C library without mallopt has nothing to set
    pages = (64 << 20) // resource.getpagesize()
    assert int(done.stdout) < pages / 10, done.stderr
