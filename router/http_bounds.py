"""What connections may take of the router."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    limit_concurrency: int = 8192  # connections at once
    timeout_head_s: float = 30.0  # from the connection, or the first byte, to the end of the head
    timeout_body_s: float = 300.0  # from there to the end of the body
    timeout_keep_alive_s: float = 75.0  # between requests; longer than clients keep them, so that it is they who close
