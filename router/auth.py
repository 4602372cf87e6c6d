"""API keys: who may ask."""

import hmac
from collections.abc import Sequence
from hashlib import sha256

# What a load balancer asks for. Compared with the path as it came: no prefix, no normalizing.
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


class ApiKeys:
    """Only digests are kept; a comparison takes the same time whatever is right of the key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def allow(self, path: str, authorization: str | None) -> bool:
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        digest = sha256(key.encode("latin-1", errors="replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)
