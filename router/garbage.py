"""Python's garbage collector, so that streams do not wait for it."""

import gc

# Requests leave no cycles behind, so there is little to find. Looking at the young costs some 0.5 ms; at those that are
# older, as long as the requests live, far more.
_YOUNG, _MIDDLE, _OLD = 1_000, 500, 10


def settle() -> None:
    """To be called when all is built that lasts as long as the process: that is not looked through again, and what
    comes is looked through more rarely than by default."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
