"""API keys: who may ask."""

import base64
import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256

# What a load balancer asks for. Compared with the path as it came: no prefix, no normalizing.
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


class ApiKeys:
    """Only digests are kept; a comparison takes the same time whatever is right of the key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def allow(self, path: str, headers: Mapping[str, str]) -> bool:
        if not self._digests or path in OPEN_PATHS:
            return True
        digest = sha256(key_in(headers)).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def owner_of(headers: Mapping[str, str]) -> str:
    """Tells those who ask with different keys apart, and no key."""
    key = key_in(headers)
    return sha256(b"owner:" + key).hexdigest()[:32] if key else ""


def key_in(headers: Mapping[str, str]) -> bytes:
    """The key as clients send it (Bearer), or as a browser does after asking for a password (Basic, any user name).

    A browser adds its Basic credentials to what other sites' pages send here, too: those are not taken.
    """
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.encode("latin-1", errors="replace")
    if scheme.lower() == "basic" and headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
