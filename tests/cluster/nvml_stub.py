"""Builds the stand-in for NVIDIA's management library: real processes load it by LD_LIBRARY_PATH where there is no GPU."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_stub.c")
NAME = "libnvidia-ml.so.1"


def build(folder: Path) -> Path:
    """Compile the stub into `folder` and return the library."""
    library = folder / NAME
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
    return library
