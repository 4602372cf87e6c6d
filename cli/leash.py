"""`python leash.py PARENT_PID CPUS COMMAND...`: becomes COMMAND, which cannot outlive its parent.

CPUS are the cores to stay on, as `0,1`; `-` for any. The kernel kills the process when its parent ends, however that
ends. This is a program and not a hook between fork and exec, where Python code is not safe.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, cpus, *command = argv
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        return  # it died before we asked
    if cpus != "-":
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
