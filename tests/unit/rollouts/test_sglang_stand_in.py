"""What takes triton's place without an accelerator: modules with kernels are imported, and no kernel starts unseen."""

import os
import subprocess
import sys

from rl_core.rollouts.sglang.cpu import STAND_IN

MODULE = """
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.jit import JITFunction

BLOCK = tl.constexpr(128)

@triton.autotune(configs=[triton.Config({"SIZE": 16})], key=["n"])
@triton.jit(do_not_specialize=["n"])
def kernel(x, n: int | tl.int32, SIZE: tl.constexpr): ...

@triton.jit
def other(x): ...

assert not isinstance(kernel, JITFunction)
assert [triton.cdiv(5, 2), triton.cdiv(4, 2)] == [3, 2]
assert [triton.next_power_of_2(n) for n in (1, 5, 8)] == [1, 8, 8]
try:
    triton.runtime.driver.active.get_current_target()
except RuntimeError as error:
    print(error)
for start in (lambda: kernel[(1,)](0, 1), lambda: other(0)):
    try:
        start()
    except NotImplementedError as error:
        print(error)
"""


def test_a_module_with_kernels_is_imported_and_a_kernel_that_is_started_says_that_it_needs_a_gpu():
    environ = os.environ | {"PYTHONPATH": str(STAND_IN)}
    done = subprocess.run([sys.executable, "-c", MODULE], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [
        word in line for word, line in zip(("driver", "kernel", "other"), done.stdout.splitlines(), strict=True)
    ] == [True] * 3
