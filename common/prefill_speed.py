"""How long computing a part of a prompt takes: measured on nodes, reckoned with there and on the router."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """A token costs more the further back it stands, since it attends to all before it."""

    token_s: float
    position_s: float = 0.0  # and so much more for each token before it

    def seconds(self, start: int, end: int) -> float:
        """Of computing the tokens [start, end) of one request."""
        return (end - start) * (self.token_s + self.position_s * (start + end - 1) / 2)
