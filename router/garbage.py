"""Python's garbage collector, so that streams do not wait for it."""

import gc

_YOUNG, _MIDDLE, _OLD = 5_000, 50, 50  # a look at so many takes 1 ms; requests free most of what they make themselves


def settle() -> None:
    """To be called when all is built that lasts as long as the process: that is not looked through again, and what
    comes is looked through more rarely than by default."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
