"""Isolates a process that runs user code from the job's keys and from the memory of the job's other processes, if the kernel allows it.

The process enters a user namespace of its own. Its uid stays the same, but it has no rights over processes outside: it cannot read their
environment, memory or open files in /proc, nor attach a debugger. It also enters a mount namespace in which empty folders cover the keys
and /dev/shm. It then drops all capabilities for good, so that none of this can be undone.

Not isolated: signals to processes of the same user, the network, and all other files of the user, including the output folder.
"""

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 1, 2, 4, 1 << 14, 1 << 18
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_SHARED_MEMORY = "/dev/shm"
_libc = ctypes.CDLL(None, use_errno=True)


def confine(hidden: Sequence[str]) -> str:
    """Isolate this process and hide the folders in `hidden`. Returns "", or the reason why the kernel does not allow it.

    The process must have a single thread. It is isolated completely or not at all: a forked copy tries it first.
    """
    trial = os.fork()
    if trial == 0:
        code = 0
        try:
            _confine(hidden)
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
    if code != 0:
        return os.strerror(code) if code > 0 else f"killed by signal {-code}"
    _confine(hidden)
    return ""


def _confine(hidden: Iterable[str]) -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")  # The kernel requires this before a group is mapped.
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    for folder in hidden:
        if Path(folder).is_dir():
            _cover(folder, _MS_RDONLY, "size=4k")
    if Path(_SHARED_MEMORY).is_dir():
        _cover(_SHARED_MEMORY, 0, "mode=1777")
    _drop_capabilities()


def _cover(folder: str, flags: int, options: str) -> None:
    mount_flags = ctypes.c_ulong(flags | _MS_NOSUID | _MS_NODEV)
    _check(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", mount_flags, options.encode()))


def _drop_capabilities() -> None:
    capability = 0
    # Without this, a program that is started as root would regain the capabilities.
    while _prctl(_PR_CAPBSET_DROP, capability) == 0:
        capability += 1
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1))


def _prctl(option: int, value: int) -> int:
    return int(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
