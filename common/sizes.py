"""Amounts of memory as people write them."""

import re

_BINARY = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS = {**_BINARY, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


_MOST_CPUS = 1 << 16  # no machine has as many


def parse_bytes(given: object) -> int:
    """`2GiB` -> 2147483648; `1.5 GB` -> 1500000000; plain numbers are bytes. A file of options may hold anything."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", given) if isinstance(given, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"an amount of memory is a number and a unit (B, KiB, MiB, GiB, KB, MB, GB), got {given!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_cpus(text: str) -> frozenset[int]:
    """`0,2-4` -> {0, 2, 3, 4}"""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"CPUs are numbers and ranges (0,2-4), got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= _MOST_CPUS:
            raise ValueError(f"there is no CPU {last}")
        cpus.update(range(first, last + 1))
    if not cpus:
        raise ValueError(f"no CPU in {text!r}")
    return frozenset(cpus)
