"""The filter of system calls that a unit asks for, applied to this process by libseccomp as systemd does."""

from __future__ import annotations

import ctypes
import errno
import mmap
import socket
from collections.abc import Sequence

SCMP_ACT_ALLOW = 0x7FFF0000
SCMP_ACT_ERRNO = 0x00050000
BY_ARGUMENTS = ("socket", "mmap", "mprotect")
SCMP_CMP_EQ, SCMP_CMP_MASKED_EQ = 4, 7


class _Compare(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def load_library() -> ctypes.CDLL:
    """Raises OSError where there is none."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    return library


def restrict(calls: Sequence[str], families: Sequence[str]) -> None:
    """From here on only ``calls`` are possible, and sockets of ``families``; others fail with EPERM."""
    library = load_library()
    context = ctypes.c_void_p(library.seccomp_init(SCMP_ACT_ERRNO | errno.EPERM))
    for number in _numbers(library, calls) - _numbers(library, BY_ARGUMENTS):
        _check(library.seccomp_rule_add_array(context, SCMP_ACT_ALLOW, number, 0, None), "rule")
    kept = {int(getattr(socket, family)) for family in families}
    for family in socket.AddressFamily:
        action = SCMP_ACT_ALLOW if family in kept else SCMP_ACT_ERRNO | errno.EAFNOSUPPORT
        _add(library, context, "socket", [_Compare(0, SCMP_CMP_EQ, int(family), 0)], action)
    both = mmap.PROT_EXEC | mmap.PROT_WRITE
    for protection in (0, mmap.PROT_EXEC, mmap.PROT_WRITE):  # not both: MemoryDenyWriteExecute=
        _add(library, context, "mmap", [_Compare(2, SCMP_CMP_MASKED_EQ, both, protection)])
    _add(library, context, "mprotect", [_Compare(2, SCMP_CMP_MASKED_EQ, mmap.PROT_EXEC, 0)])
    _check(library.seccomp_load(context), "load")


def _numbers(library: ctypes.CDLL, calls: Sequence[str]) -> set[int]:
    """Those of this architecture: a unit's groups name calls of all."""
    found = {int(library.seccomp_syscall_resolve_name(name.encode())) for name in calls}
    return {number for number in found if number >= 0}


def _add(
    library: ctypes.CDLL, context: ctypes.c_void_p, name: str, compares: list[_Compare], action: int = SCMP_ACT_ALLOW
) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    array = (_Compare * len(compares))(*compares)
    _check(library.seccomp_rule_add_array(context, action, number, len(compares), array), name)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(-result, f"libseccomp: {what}")
