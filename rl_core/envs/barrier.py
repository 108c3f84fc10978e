"""Takes a process out of reach of the job's keys and of the memory of its other processes, as far as the kernel allows.

A user namespace of its own: the uid is the same, but over processes outside there are no rights, so their environment, memory, open files
and folders in /proc stay closed and no debugger can be attached. A mount namespace of its own: empty folders lie over the keys and over
/dev/shm. Capabilities are given up for good, so none of it can be undone.

No barrier to: signals to processes of the same user, the network, and all other files of this user, the output folder among them.
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
    """Put this process behind the barrier, `hidden` folders out of its sight; return "", or why the kernel does not allow it.

    Only while it has one thread. What cannot be done whole is not done at all: a copy of the process tries it first.
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
    Path("/proc/self/setgroups").write_text("deny")  # the kernel wants it before a group is mapped
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    for folder in hidden:
        if Path(folder).is_dir():
            _cover(folder, _MS_RDONLY, "size=4k")
    if Path(_SHARED_MEMORY).is_dir():
        _cover(_SHARED_MEMORY, 0, "mode=1777")
    _give_up_capabilities()


def _cover(folder: str, flags: int, options: str) -> None:
    wanted = ctypes.c_ulong(flags | _MS_NOSUID | _MS_NODEV)
    _check(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", wanted, options.encode()))


def _give_up_capabilities() -> None:
    number = 0
    while _prctl(_PR_CAPBSET_DROP, number) == 0:  # else a program that is started as root would have them again
        number += 1
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
