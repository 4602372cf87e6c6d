"""The secret that all processes of one cluster share: every gRPC call to a node or a registry carries it."""

import hmac
import secrets
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

CLUSTER_SECRET_VARIABLE = "KVASIR_CLUSTER_SECRET"
_MIN_LENGTH = 16


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def cluster_secret(environ: Mapping[str, str], path: str | None = None) -> str | None:
    """From the file, or else from the environment; None if neither names one. ValueError says what is wrong."""
    if path is not None:
        try:
            return _checked(Path(path).read_text().strip(), path)
        except OSError as error:
            raise ValueError(f"the cluster secret in {path} cannot be read: {error.strerror}") from error
    if CLUSTER_SECRET_VARIABLE in environ:
        return _checked(environ[CLUSTER_SECRET_VARIABLE].strip(), CLUSTER_SECRET_VARIABLE)
    return None


def same_secret(given: str | bytes | None, expected: str) -> bool:
    """Takes as long for a wrong secret as for the right one."""
    given_bytes = given.encode() if isinstance(given, str) else given or b""
    return hmac.compare_digest(given_bytes, expected.encode())


def is_loopback(host: str) -> bool:
    """True if nobody outside this machine can reach a server that listens on `host`."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name: it may resolve to anything
        return False


def _checked(secret: str, origin: str) -> str:
    if len(secret) < _MIN_LENGTH:
        raise ValueError(f"the cluster secret in {origin} has {len(secret)} characters, it must have {_MIN_LENGTH}")
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError(f"the cluster secret in {origin} must be printable ASCII: it travels as gRPC metadata")
    return secret
