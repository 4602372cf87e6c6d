"""What must be settled before torch is imported: threads, how they wait, on which CPUs; and how the process ends."""

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from kvasir.common.logging import configure_logging
from kvasir.common.sizes import parse_cpus
from kvasir.node.config import NodeConfig


def prepare_process(config: NodeConfig, role: str) -> None:
    """Once, first thing in `main`. OpenMP reads its environment when it is loaded, and never again."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before its threads were settled")
    port = config.listen.rpartition(":")[2]
    configure_logging(config.log_level, f"{role}:{port}" if port != "0" else f"{role}-{os.getpid()}")
    if config.cpus:
        try:
            os.sched_setaffinity(0, parse_cpus(config.cpus))
        except (OSError, OverflowError):
            sys.exit(f"error: --cpus {config.cpus}: none of them may be used here")
    num_threads = str(num_compute_threads(config))
    os.environ.update(
        {
            "OMP_NUM_THREADS": num_threads,
            "MKL_NUM_THREADS": num_threads,
            "NUMBA_NUM_THREADS": num_threads,
            # Idle threads sleep: a node beside it, or the other role on the same machine, needs the core.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "KMP_BLOCKTIME": "0",
        }
    )


def num_compute_threads(config: NodeConfig) -> int:
    return config.threads or len(os.sched_getaffinity(0))


def leave(status: int) -> NoReturn:
    """Once all that the node had is closed: to take Python, torch and numba apart frees only what the kernel frees by
    itself, and takes about a second."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # it was closed from the start, or nobody reads it any more
            stream.flush()
    os._exit(status)
