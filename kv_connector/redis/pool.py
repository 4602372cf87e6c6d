"""Links that are kept to be used again, at most one per thread that uses them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.redis.link import RedisLink
from kvasir.kv_connector.threads import Job

_CONNECT_TIMEOUT_S = 2.0


class RedisPool:
    def __init__(self, url: str, timeout_s: float) -> None:
        """url: redis://, rediss:// or unix://, with the client library's options in its query."""
        self._timeout_s = timeout_s
        until_ours_s = min(_CONNECT_TIMEOUT_S, timeout_s / 2)  # sooner than our callers give up: they learn the reason
        try:
            self._library = ConnectionPool.from_url(
                url,
                socket_timeout=until_ours_s,
                socket_connect_timeout=until_ours_s,
                retry=Retry(NoBackoff(), 0),  # the core decides about retries
                protocol=2,
            )
            self._connection()
        except (ValueError, TypeError):  # its message may quote a part of the password
            raise ValueError("redis_url must be like rediss://user:password@host:6379/0") from None
        self._idle: list[RedisLink] = []
        self._in_use: set[RedisLink] = set()
        self._is_closed = False

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_links(self) -> int:
        return len(self._idle) + len(self._in_use)

    @contextmanager
    def link(self, job: Job[Any]) -> Iterator[RedisLink]:
        """A link for one thread. Calling the job off cuts it. After any error the link is closed, never reused: a reply
        might be left unread on it."""
        link = self._take()
        self._in_use.add(link)
        try:
            job.can_be_cut(link.cut)
            yield link
            job.can_be_cut(None)
        except BaseException as error:
            link.close()
            if isinstance(error, KVTransferError):
                self._drop_idle()  # the server may have gone, or be a replica now: connect anew, by its name
            raise
        finally:
            self._in_use.discard(link)
        self._idle.append(link)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        with suppress(IndexError):  # other threads may take links meanwhile
            while True:
                self._idle.pop().close()

    def _take(self) -> RedisLink:
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return RedisLink(self._connection(), self._timeout_s)
            if link.is_idle:
                return link
            link.close()

    def _connection(self) -> Any:
        """A connection as the URL says, not opened yet. Not from the library's pool, which keeps its own count."""
        return self._library.connection_class(**self._library.connection_kwargs)
