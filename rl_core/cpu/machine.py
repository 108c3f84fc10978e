"""Which library of torch multiplies float32 matrices faster on this machine: MKL, its default on x86, or oneDNN.

On processors that are not from Intel, MKL reaches about half of the speed of oneDNN. On Intel processors MKL is faster, because it copies
no operand: by 27 % in generation and 12 % in training of a million parameters (benchmarks/trl_side_by_side.py). The choice depends on the
vendor and not on a measurement, so that a restarted process computes the same rounded results.
"""

from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
INTEL = "GenuineIntel"


@cache
def prefers_onednn() -> bool:
    """Return whether float32 products should go to oneDNN: it is part of this torch, and the processor is not Intel's."""
    return has_onednn() and maker(CPUINFO) != INTEL


def has_onednn() -> bool:
    """Return whether this torch carries oneDNN and its linear product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def maker(cpuinfo: Path) -> str:
    """Return the vendor of the processor from /proc/cpuinfo; empty if it is not there (not x86, not Linux)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
