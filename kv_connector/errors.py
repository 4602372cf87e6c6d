"""Errors of frames and peers."""

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.metrics import MissReason


class BadFrame(Exception):
    """A block that has arrived must not be used. `reason` is how it is counted."""

    def __init__(self, reason: MissReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OtherVersion(KVTransferError):
    """The two ends speak different versions of a connector's protocol: no block will ever come from there."""
