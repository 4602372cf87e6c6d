"""What can go wrong, named for what the caller can do about it.

ServingError
  InvalidRequest       the client's fault: it can never succeed as it is
  Overloaded           no room now: later or elsewhere
    Draining           this node takes nothing new
  DeadlineExceeded     the request's own time is over
  NodeUnavailable      the node is lost; another may do it
  KVTransferError      blocks did not come: fetch again, or compute them
  NumericalError       the model gave NaN or infinite logits
  EngineDead           this process must be restarted
"""


class ServingError(Exception):
    pass


class InvalidRequest(ServingError):
    """`param` is the name of the field at fault, as the client wrote it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(ServingError):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Overloaded):
    pass


class DeadlineExceeded(ServingError):
    pass


class NodeUnavailable(ServingError):
    pass


class KVTransferError(ServingError):
    pass


class NumericalError(ServingError):
    pass


class EngineDead(ServingError):
    pass
