"""What is wrong with a frame, by name."""

from kvasir.kv_connector.metrics import MissReason


class BadFrame(Exception):
    """A block that came must not be used; `reason` is the name under which that is counted."""

    def __init__(self, reason: MissReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
