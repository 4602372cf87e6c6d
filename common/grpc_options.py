"""What both ends of a gRPC connection must agree on, in one place.

A message that one side may send and the other refuses ends a session, so the bound is the same four times (send and
receive, client and server). A client that pings more often than the server tolerates is thrown out with GOAWAY
"too_many_pings", so the server's tolerance is half of the client's interval.
"""

MAX_MESSAGE_BYTES = 32 << 20  # a prompt takes 4 bytes a token: eight million tokens
SECRET_METADATA_KEY = "kvasir-secret"

_KEEPALIVE_INTERVAL_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_RECONNECT_AFTER_MS = 100
_RECONNECT_AT_LEAST_EVERY_MS = 2_000
_LOOKAHEAD_BYTES = 1 << 20

Options = list[tuple[str, int]]


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        *_common_options(max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_INTERVAL_MS),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_AFTER_MS),
        ("grpc.min_reconnect_backoff_ms", _RECONNECT_AFTER_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_AT_LEAST_EVERY_MS),
        ("grpc.enable_retries", 0),  # we retry ourselves: only we know what may be done twice
        ("grpc.enable_http_proxy", 0),  # nodes are reached directly, whatever the environment says
        ("grpc.use_local_subchannel_pool", 1),  # a closed channel is closed, not kept for the next one
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        *_common_options(max_message_bytes),
        ("grpc.keepalive_time_ms", 2 * _KEEPALIVE_INTERVAL_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_INTERVAL_MS // 2),
        ("grpc.so_reuseport", 0),  # a second process on our port is an error, not half of our calls
    ]


def _common_options(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # otherwise pings stop after two in a long silence
        ("grpc.http2.bdp_probe", 0),  # a ping, and its answer, with what comes: half of what a small message costs
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),  # which the probe would else find out
    ]
