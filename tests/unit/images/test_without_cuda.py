"""The stub that takes the place of the CUDA libraries: the dynamic linker of this machine is the judge."""

import ctypes
import random
from pathlib import Path

import pytest

from worker_images import without_cuda


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_a_stub_loads_and_each_of_its_functions_tells_an_error(tmp_path: Path, count: int) -> None:
    names = [f"cuFunction{number}".encode() for number in range(count)]
    path = tmp_path / "stub.so"
    path.write_bytes(without_cuda.stub_library(names))
    library = ctypes.CDLL(str(path))
    assert all(getattr(library, name.decode())() == 999 for name in names)
    assert not hasattr(library, "cuAbsent")


def test_a_stub_brings_along_what_it_needs_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "libfunctions_of_test.so").write_bytes(without_cuda.stub_library([b"ncclBrought"]))
    empty = tmp_path / "libempty_of_test.so"
    empty.write_bytes(without_cuda.stub_library([], needed=(b"libfunctions_of_test.so",)))
    assert ctypes.CDLL(str(empty), mode=ctypes.RTLD_GLOBAL).ncclBrought() == 999


def test_names_of_any_shape_are_found_in_the_hash_table(tmp_path: Path) -> None:
    letters = random.Random(0)
    names = sorted({"".join(letters.choices("abcXYZ_0129", k=letters.randint(1, 60))).encode() for _ in range(300)})
    path = tmp_path / "names.so"
    path.write_bytes(without_cuda.stub_library(names))
    library = ctypes.CDLL(str(path))
    assert all(getattr(library, name.decode())() == 999 for name in names)


def test_a_library_tells_what_it_defines(tmp_path: Path) -> None:
    import _ctypes

    library = without_cuda.Library(Path(_ctypes.__file__))
    assert b"PyInit__ctypes" in library.symbols(defined=True)
    assert b"PyInit__ctypes" not in library.symbols(defined=False)
    assert b"PyErr_Clear" in library.symbols(defined=False)
    assert any(name.startswith(b"libc.so") for name in library.needed())


def test_no_torch_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"torch/lib must hold torch's libraries, found none"):
        without_cuda.cut(tmp_path)
