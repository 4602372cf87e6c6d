"""API keys: who may ask."""

import base64
import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from kvasir.router.tenants.tenant import NO_LIMITS, Limits, Tenant, read_tenants, tenant_of_key

# What a load balancer asks for. Compared with the path as it came: no prefix, no normalizing.
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


class ApiKeys:
    """Only digests are kept; a comparison takes the same time whatever is right of the key."""

    def __init__(self, tenants: Sequence[Tenant], limits: Limits = NO_LIMITS) -> None:
        """Without tenants anybody may ask, all of them together within `limits`."""
        self._tenants = tuple(tenants)
        self._anybody = Tenant("anybody", limits=limits)

    @property
    def are_wanted(self) -> bool:
        return bool(self._tenants)

    def tenant(self, path: str, headers: Mapping[str, str]) -> Tenant | None:
        """Whose key it is; None if it is nobody's."""
        if not self._tenants or path in OPEN_PATHS:
            return self._anybody
        digest = sha256(key_in(headers)).digest()
        matches = [tenant for tenant in self._tenants if hmac.compare_digest(digest, tenant.digest)]
        return matches[0] if matches else None


def api_keys(keys: Sequence[str], limits: Limits = NO_LIMITS, path: Path | None = None) -> ApiKeys:
    """Keys as they are, and those of a file of digests. ValueError if that file is not as it should be."""
    tenants = [tenant_of_key(key, limits) for key in keys]
    return ApiKeys(tenants + ([] if path is None else read_tenants(path, limits)), limits)


def key_in(headers: Mapping[str, str]) -> bytes:
    """The key as clients send it (Bearer), or as a browser does after asking for a password (Basic, any user name).

    A browser adds its Basic credentials to what other sites' pages send here, too: those are not taken.
    """
    scheme, _, credentials = headers.get("authorization", "").strip(" \t").partition(" ")
    credentials = credentials.strip(" \t")
    if scheme.lower() == "bearer":
        return credentials.encode("latin-1", errors="replace")
    if scheme.lower() == "basic" and headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
