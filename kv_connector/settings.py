"""The settings of a connector, a sender and a receiver."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.common.addresses import join_address
from kvasir.kv_connector.costs import CostRule
from kvasir.kv_connector.forms import CODEC_SETTINGS

_SLOWEST_OF_MEASURED = 0.25
_SLOWEST_OF_MINIMUM = 0.1  # after a stall, the measured bandwidth is near zero, and would give no deadline at all


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    name: str = "tcp"  # or memory, redis, shared_storage, an entry point, or "module:Class"

    codec: str = "none"  # for blocks that this node sends; one of CODEC_SETTINGS
    costs: CostRule = field(default_factory=CostRule)

    # tcp
    listen_host: str = "127.0.0.1"
    listen_port: int = 0  # 0: any free port
    advertise_host: str = ""  # where others reach this node, if not at `listen_host`
    secret: str = field(default="", repr=False)  # the cluster's; required off loopback
    encryption: bool = False  # ZeroMQ's CURVE, with keys derived from the secret; must be the same on all nodes
    window_bytes: int = 16 << 20  # blocks asked for and not yet taken in, per pair of nodes

    # redis
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)  # may hold a password
    redis_prefix: str = "kvasir"

    # shared_storage
    path: str = ""
    kv_quota_bytes: int | None = None  # None: half of what is free on its disk plus what the store takes

    # stores
    store_ttl_s: float = 3600.0  # a block expires this long after it was last written or read
    store_backoff_s: float = 5.0  # a store that failed is not asked for this long
    lookup_timeout_s: float = 1.0

    lease_s: float = 30.0
    # A published block is given up after base + outstanding bytes / bandwidth. That bandwidth is a quarter of the one
    # measured, but at least a tenth of the minimum below; before anything has been measured, it is the minimum.
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

    def endpoint(self, port: int) -> str:
        """Where others reach this node, if it listens at that port."""
        return join_address(self.advertise_host or self.listen_host, port)

    def transfer_allowance_s(self, num_bytes: int, bandwidth_bytes_per_s: float | None = None) -> float:
        """How many seconds a transfer of so many bytes may take before it is given up."""
        slowest = self.min_bandwidth_bytes_per_s
        if bandwidth_bytes_per_s is not None:
            slowest = max(_SLOWEST_OF_MINIMUM * slowest, _SLOWEST_OF_MEASURED * bandwidth_bytes_per_s)
        return self.fetch_timeout_base_s + num_bytes / slowest
