"""What a connector, a sender and a receiver can be told."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.kv_connector.base import CODEC_AUTO, CODECS
from kvasir.kv_connector.costs import CostRule

CODEC_SETTINGS = (CODEC_AUTO, *CODECS)
_SLOWER_THAN_MEASURED = 0.25
_SLOWER_THAN_UNMEASURED = 0.1  # at the least: what was measured of a stall is next to nothing, and no deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    name: str = "tcp"  # or memory, redis, shared_storage, an entry point, or "module:Class"

    codec: str = "none"  # of what this node sends, one of CODEC_SETTINGS; auto: none or lossless, by bandwidth
    costs: CostRule = field(default_factory=CostRule)

    # tcp
    listen_host: str = "127.0.0.1"
    listen_port: int = 0  # 0: any free one
    advertise_host: str = ""  # where others reach this node, if not at `listen_host`
    secret: str = field(default="", repr=False)  # the cluster's; required off loopback
    encryption: bool = False  # by CURVE, with keys derived from the secret; the same on all nodes
    window_bytes: int = 16 << 20  # asked for and not yet taken in, per pair of nodes

    # redis
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)  # may hold a password
    redis_prefix: str = "kvasir"

    # shared_storage
    path: str = ""
    kv_quota_bytes: int | None = None  # None: half of what its disk has free or the store has

    # stores
    store_ttl_s: float = 3600.0  # since it was written or read last
    store_backoff_s: float = 5.0  # a store that failed is left alone for so long
    lookup_timeout_s: float = 1.0

    lease_s: float = 30.0
    # A published block is given up after base + bytes outstanding / bandwidth: a quarter of what was measured, but no
    # less than a tenth of the one below; before there is a measurement, the one below.
    fetch_timeout_base_s: float = 5.0
    min_bandwidth_bytes_per_s: float = 32e6

    options: Mapping[str, str] = field(default_factory=dict)  # for connectors of third parties

    def __post_init__(self) -> None:
        if self.codec not in CODEC_SETTINGS:
            raise ValueError(f"codec must be one of {', '.join(CODEC_SETTINGS)}, got {self.codec!r}")
        if not 0 <= self.listen_port <= 65535:
            raise ValueError(f"listen_port must be 0 to 65535, got {self.listen_port}")
        if self.kv_quota_bytes is not None and self.kv_quota_bytes <= 0:
            raise ValueError(f"kv_quota_bytes must be positive, got {self.kv_quota_bytes}")
        if not self.redis_prefix:
            raise ValueError("redis_prefix must not be empty: others may use the server too")
        for name in ("window_bytes", "store_ttl_s", "lookup_timeout_s", "lease_s", "fetch_timeout_base_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.min_bandwidth_bytes_per_s <= 0:
            raise ValueError(f"min_bandwidth_bytes_per_s must be positive, got {self.min_bandwidth_bytes_per_s}")

    def transfer_allowance_s(self, num_bytes: int, bandwidth_bytes_per_s: float | None = None) -> float:
        """How long so many bytes may take before they are given up."""
        slowest = self.min_bandwidth_bytes_per_s
        if bandwidth_bytes_per_s is not None:
            slowest = max(_SLOWER_THAN_UNMEASURED * slowest, _SLOWER_THAN_MEASURED * bandwidth_bytes_per_s)
        return self.fetch_timeout_base_s + num_bytes / slowest
