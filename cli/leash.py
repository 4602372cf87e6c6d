"""`python leash.py PARENT_PID COMMAND...`: becomes COMMAND, which cannot outlive its parent.

The kernel kills the process when its parent ends, however that ends. This is a program and not a hook between fork
and exec, where Python code is not safe.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, *command = argv
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        return  # it died before we asked
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
