"""Cut the CUDA libraries out of an installed torch: `python without_cuda.py SITE_PACKAGES`.

PyPI has no CPU build of torch for x86-64. Its CUDA build links a dozen CUDA libraries of 3.6 GB together and calls none of them on a
machine without a GPU, but the dynamic linker wants each by name and, as Python binds at once, each function. So every missing library
becomes a link to an empty one, which brings a second along, of 40 KB, in which every function returns 999 (cudaErrorUnknown). Two, because
the linker takes a function without a version from any library but the one that the version names. What torch does call while it
looks for a GPU (libcudart, libcupti, libcufile) has to be installed for real. For x86-64 Linux.
"""

import mmap
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

CUDA_LIBRARY = re.compile(rb"lib(?!cuda\.)(cu|nccl|nv)\w*\.so\.\d+")
"""All but the driver, libcuda.so.1, which has to be missing for torch to find no GPU."""
CUDA_FUNCTION = re.compile(rb"(cu|nccl|nv)\w+")
EMPTY, FUNCTIONS = "libcuda_absent.so", "libcuda_absent_functions.so"
_RETURN_999 = b"\xb8\xe7\x03\x00\x00\xc3"  # mov eax, 999; ret
_PAGE = 0x1000
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_DT_NULL, _DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_RUNPATH = 0, 1, 4, 5, 6, 10, 11, 29
_GLOBAL_FUNCTION = 0x12
_READ, _WRITE, _EXECUTE = 4, 2, 1


class Library:
    """The dynamic names of one shared library (ELF, 64 bits, little endian)."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (table,) = struct.unpack_from("<Q", self._map, 40)
        (count,) = struct.unpack_from("<H", self._map, 60)
        self._sections = [_SECTION.unpack_from(self._map, table + index * _SECTION.size) for index in range(count)]

    def needed(self) -> set[bytes]:
        """Return the names of the libraries it is linked with."""
        return {
            self._text(strings, value)
            for offset, size, strings in self._of_type(_SHT_DYNAMIC)
            for tag, value in struct.iter_unpack("<QQ", self._map[offset : offset + size])
            if tag == _DT_NEEDED
        }

    def symbols(self, *, defined: bool) -> set[bytes]:
        """Return the names it defines, or those it takes from others."""
        return {
            self._text(strings, name)
            for offset, size, strings in self._of_type(_SHT_DYNSYM)
            for name, _, _, section, _, _ in _SYMBOL.iter_unpack(self._map[offset : offset + size])
            if name and bool(section) == defined
        }

    def _of_type(self, section_type: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset, size, offset of its strings) of the sections of one type."""
        for _, kind, _, _, offset, size, link, *_ in self._sections:
            if kind == section_type:
                yield offset, size, self._sections[link][4]

    def _text(self, strings: int, offset: int) -> bytes:
        return self._map[strings + offset : self._map.find(b"\0", strings + offset)]


def stub_library(functions: list[bytes], *, needed: tuple[bytes, ...] = ()) -> bytes:
    """Return a shared library that defines `functions`, unversioned, each returning 999, and brings `needed` of its folder along."""
    strings = b"\0" + b"".join(name + b"\0" for name in (*functions, *needed, b"$ORIGIN"))

    def text(name: bytes) -> int:
        return strings.index(b"\0" + name + b"\0") + 1

    code_at = 64 + 4 * 56
    symbols_at = _aligned(code_at + len(_RETURN_999))
    symbols = bytes(_SYMBOL.size) + b"".join(
        _SYMBOL.pack(text(name), _GLOBAL_FUNCTION, 0, 1, code_at, len(_RETURN_999)) for name in functions
    )
    hash_at = symbols_at + len(symbols)
    hashes = _hash_table(functions)
    strings_at = hash_at + len(hashes)
    end = strings_at + len(strings)
    dynamic_at = (end + _PAGE - 1) // _PAGE * _PAGE  # a page of its own: the linker writes into it
    dynamic = b"".join(
        struct.pack("<QQ", *entry)
        for entry in (
            *((_DT_NEEDED, text(name)) for name in needed),
            (_DT_RUNPATH, text(b"$ORIGIN")),
            (_DT_HASH, hash_at),
            (_DT_STRTAB, strings_at),
            (_DT_STRSZ, len(strings)),
            (_DT_SYMTAB, symbols_at),
            (_DT_SYMENT, _SYMBOL.size),
            (_DT_NULL, 0),
        )
    )
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    header += _segment(1, _READ | _EXECUTE, 0, end) + _segment(1, _READ | _WRITE, dynamic_at, len(dynamic))
    header += _segment(2, _READ | _WRITE, dynamic_at, len(dynamic))
    header += _segment(0x6474E551, _READ | _WRITE, 0, 0)  # no executable stack
    body = (header + _RETURN_999).ljust(symbols_at, b"\0") + symbols + hashes + strings
    return body.ljust(dynamic_at, b"\0") + dynamic


def _segment(kind: int, flags: int, offset: int, size: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, _PAGE)


def _aligned(offset: int) -> int:
    return (offset + 7) // 8 * 8


def _hash_table(names: list[bytes]) -> bytes:
    """Return the System V hash table of symbols 1, 2, ... of these names (generic ABI, chapter 5)."""
    size = max(len(names), 1)
    buckets, chain = [0] * size, [0] * (len(names) + 1)
    for number, name in enumerate(names, start=1):
        value = 0
        for byte in name:
            value = (value << 4) + byte
            value = (value ^ ((value & 0xF0000000) >> 24)) & 0x0FFFFFFF
        chain[number], buckets[value % size] = buckets[value % size], number
    return struct.pack(f"<{2 + size + len(chain)}I", size, len(chain), *buckets, *chain)


def cut(site_packages: Path) -> tuple[int, int]:
    """Link the CUDA libraries that torch misses to one stub; return the numbers of libraries and functions.

    Raises FileNotFoundError when there is no torch in `site_packages`.
    """
    folder = site_packages / "torch" / "lib"
    present = {path.name for path in [*folder.glob("*.so*"), *site_packages.glob("nvidia/*/lib/*.so*")]}
    libraries = [Library(path) for path in sorted(folder.glob("lib*.so"))]
    if not libraries:
        raise FileNotFoundError(f"{folder} must hold torch's libraries, found none; name torch's site-packages")
    missing = sorted(
        name
        for name in set().union(*(library.needed() for library in libraries))
        if CUDA_LIBRARY.fullmatch(name) and name.decode() not in present
    )
    required = set().union(*(library.symbols(defined=False) for library in libraries))
    defined = set().union(
        *(library.symbols(defined=True) for library in libraries),
        *(Library(path).symbols(defined=True) for path in site_packages.glob("nvidia/*/lib/*.so*")),
    )
    functions = sorted(name for name in required - defined if CUDA_FUNCTION.fullmatch(name))
    (folder / FUNCTIONS).write_bytes(stub_library(functions))
    (folder / EMPTY).write_bytes(stub_library([], needed=(FUNCTIONS.encode(),)))
    for name in missing:
        (folder / name.decode()).symlink_to(EMPTY)
    return len(missing), len(functions)


if __name__ == "__main__":
    libraries, functions = cut(Path(sys.argv[1]))
    sys.stdout.write(f"without_cuda: {libraries} libraries, {functions} functions replaced by a stub\n")
