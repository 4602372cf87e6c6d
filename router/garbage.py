"""Python's garbage collector, so that streams do not wait for it."""

import gc

# Requests leave no cycles behind, so there is little to find. A look at the young costs some 0.2 ms, as they are few: a
# request that begins is enough for a look. Looking at those that are older costs far more, as long as requests live.
_YOUNG, _MIDDLE, _OLD = 200, 2_000, 10


def settle() -> None:
    """To be called when all is built that lasts as long as the process: that is not looked through again, and what
    comes is looked through more rarely than by default."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
