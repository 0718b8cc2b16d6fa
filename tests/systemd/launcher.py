"""What systemd does between fork and exec: passes descriptors from 3 on, says so, restricts, and becomes the service.

python -m tests.systemd.launcher '{"fds": [5, 6], "names": "a:b", "filter": [...]}' COMMAND...
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

FIRST_FD = 3
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1


def main() -> None:
    told, command = json.loads(sys.argv[1]), sys.argv[2:]
    pass_sockets(told)
    if told.get("filter"):
        from tests.systemd.seccomp import restrict

        restrict(told["filter"], told["families"])
    if told.get("mdwe"):
        refuse_writable_code()
    os.execv(command[0], command)


def pass_sockets(told: dict[str, Any]) -> None:
    """Moves the descriptors out of the way first: one of them may be where another one belongs."""
    moved = [os.dup(fd) for fd in told["fds"]]
    high = [fd for fd in moved if fd >= FIRST_FD + len(moved)]
    while len(high) < len(moved):
        high = [os.dup(fd) if fd < FIRST_FD + len(moved) else fd for fd in moved]
        moved = high
    for number, fd in enumerate(high):
        os.dup2(fd, FIRST_FD + number, inheritable=True)
    if moved:
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(moved)), "LISTEN_FDNAMES": told["names"]}


def refuse_writable_code() -> None:
    """MemoryDenyWriteExecute=, by the kernel's own means; the filter has what systemd's filter has."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_MDWE")


if __name__ == "__main__":
    main()
