"""How the wire names a sequence, and how the engine does."""

from typing import NamedTuple

from kvasir.engine.request import RequestId


class SequenceAddress(NamedTuple):
    """Where one sequence's events go: the wire's way of naming a `RequestId`."""

    session_id: str
    handle: int
    sequence: int


def request_id_of(address: SequenceAddress) -> RequestId:
    """("s1", 7, 0) -> "s1/7/0" """
    return RequestId(f"{address.session_id}/{address.handle}/{address.sequence}")


def address_of(request_id: RequestId) -> SequenceAddress:
    """ "s1/7/0" -> ("s1", 7, 0)"""
    session_id, handle, sequence = request_id.rsplit("/", 2)
    return SequenceAddress(session_id, int(handle), int(sequence))
