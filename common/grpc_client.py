"""gRPC channels as all of ours are: bounded messages, agreed keepalive, the cluster's secret on every call.

The secret is added by a channel around the channel and not by `grpc.aio` client interceptors: those turn a
bidirectional stream into two queues and a task of their own, which costs copies per message and blurs cancellation.
"""

from collections.abc import Callable
from typing import Any, cast

import grpc.aio

from kvasir.common.grpc_options import MAX_MESSAGE_BYTES, SECRET_METADATA_KEY, client_options

MultiCallable = Callable[..., Any]


def open_channel(address: str, secret: str | None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """Connects when first used, and again after a loss. To be closed by the caller: `await channel.close(None)`."""
    channel = grpc.aio.insecure_channel(address, options=client_options(max_message_bytes))
    return channel if secret is None else cast(grpc.aio.Channel, _SecretChannel(channel, secret))


class _SecretChannel:
    """What generated stubs and our own code use of `grpc.aio.Channel`."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._channel = channel
        self._secret = secret
        self.close = channel.close
        self.channel_ready = channel.channel_ready

    async def __aenter__(self) -> "_SecretChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    def unary_unary(self, *args: Any, **kwargs: Any) -> MultiCallable:
        return self._with_secret(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> MultiCallable:
        return self._with_secret(self._channel.unary_stream(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> MultiCallable:
        return self._with_secret(self._channel.stream_stream(*args, **kwargs))

    def _with_secret(self, call: MultiCallable) -> MultiCallable:
        pair = (SECRET_METADATA_KEY, self._secret)

        def call_with_secret(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), pair), **kwargs)

        return call_with_secret
