"""Who asks: each API key names a tenant, with limits of its own and, if wanted, a prefix cache of its own."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one tenant; 0: none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # prompts and answers together
    max_concurrent_requests: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    digest: bytes = b""  # SHA-256 of the key
    limits: Limits = NO_LIMITS
    is_operator: bool = False  # sees what is said of others, though tenants are isolated

    @property
    def owner(self) -> str:
        """Tells what belongs to one tenant from what belongs to another; says nothing of the key."""
        return sha256(b"owner:" + self.digest).hexdigest()[:32]

    def salted(self, cache_salt: str) -> str:
        """The same for nobody else: what one tenant has cached, no other can find, or time."""
        return sha256(b"salt of " + self.digest + cache_salt.encode()).hexdigest()


def tenant_of_key(key: str, limits: Limits) -> Tenant:
    digest = sha256(key.encode()).digest()
    return Tenant(f"key-{digest.hex()[:8]}", digest, limits)


# Of the HTTP request that is served in this context.
ANYBODY = Tenant("anybody")
current_tenant: ContextVar[Tenant] = ContextVar("current_tenant", default=ANYBODY)
# Headers of its answer that say what the tenant has left; filled when that is known.
current_standing: ContextVar[dict[str, str]] = ContextVar("current_standing")

_Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, StringConstraints(min_length=1)]
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    max_concurrent_requests: _Count | None = None
    is_operator: bool = False


def read_tenants(path: Path, defaults: Limits) -> list[Tenant]:
    """A YAML list of {name, sha256 (hex, of the key), and limits where they are not the default}.

    ValueError if the file says anything else: a key that is not read is a door that stays shut, or open.
    """
    try:
        entries = TypeAdapter(list[_Entry]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
    _refuse_doubles(path, [entry.name for entry in entries])
    _refuse_doubles(path, [entry.sha256 for entry in entries])
    return [
        Tenant(entry.name, bytes.fromhex(entry.sha256), _limits(entry, defaults), entry.is_operator)
        for entry in entries
    ]


def _limits(entry: _Entry, defaults: Limits) -> Limits:
    def pick(own: int | None, default: int) -> int:
        return default if own is None else own

    return Limits(
        requests_per_minute=pick(entry.requests_per_minute, defaults.requests_per_minute),
        tokens_per_minute=pick(entry.tokens_per_minute, defaults.tokens_per_minute),
        max_concurrent_requests=pick(entry.max_concurrent_requests, defaults.max_concurrent_requests),
    )


def _refuse_doubles(path: Path, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        double = next(value for value in values if values.count(value) > 1)
        raise ValueError(f"{path}: {double} is there twice")
