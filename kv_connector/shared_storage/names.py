"""Names of files in a shared folder. They are made of hashes and layouts, never of a request's text.

3fa0...-exact-float32-0-3        a block: its store key
0c5d....17.tmp                   a block that is being written aside, before it is renamed
"""

import os
import re
from itertools import count

_BLOCK = re.compile(r"[0-9a-f]{64}(-[0-9a-z]+){1,8}")
_ASIDE = re.compile(r"[0-9a-f]{32}\.[0-9]{1,18}\.tmp")
_asides = map(f"{os.urandom(16).hex()}.{{}}.tmp".format, count())  # of this process


def is_block(name: str) -> bool:
    return _BLOCK.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    return is_block(name) or _ASIDE.fullmatch(name) is not None


def checked(name: str) -> str:
    """The name itself; ValueError if no file of ours can have it. Every path that is opened passes through here."""
    if not is_ours(name):
        raise ValueError(f"not the name of a stored block: {name!r}")
    return name


def new_aside() -> str:
    """A name that nobody else uses."""
    return next(_asides)
