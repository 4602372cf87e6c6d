"""The sending end of a one-sided connector: lends blocks for a limited time, and tells receivers where they lie."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockKey, BlockSource, TransferId
from kvasir.kv_connector.one_sided import protocol
from kvasir.kv_connector.one_sided.engine import Pool
from kvasir.kv_connector.settings import ConnectorSettings

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024
_MAX_LOANS_PER_CONNECTION = 1024
_MAX_LENT_PER_CONNECTION = 2048  # blocks
_STALL_TIMEOUT_S = 3.0


@dataclass(eq=False, slots=True)
class _Loan:
    transfer_id: TransferId
    keys: list[BlockKey] = field(default_factory=list)
    end: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    loans: dict[bytes, _Loan] = field(default_factory=dict)

    def may_ask(self, request: bytes) -> bool:
        return request not in self.loans and len(self.loans) < _MAX_LOANS_PER_CONNECTION

    @property
    def num_lent(self) -> int:
        return sum(len(loan.keys) for loan in self.loans.values())


class LoanServer:
    def __init__(
        self,
        source: BlockSource,
        pool: Pool | None,
        engine_description: bytes,
        settings: ConnectorSettings,
        lending: Callable[[bool], None],
    ) -> None:
        self._source = source
        self._pool = pool or Pool(0, 0, 0)
        self._engine_description = engine_description
        self._settings = settings
        self._lending = lending
        self._loan_s = settings.lease_s
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._loans: set[_Loan] = set()

    async def start(self) -> int:
        """Listen as the settings say, and return the port."""
        self._server = await asyncio.start_server(
            self._accept, self._settings.listen_host, self._settings.listen_port, limit=protocol.MAX_REQUEST_BYTES
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Lend nothing from now on. Blocks that are lent stay so until `take_all_back`."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def take_all_back(self) -> None:
        for loan in list(self._loans):
            self._take_back(loan)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        connection = _Connection(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            async with asyncio.timeout(protocol.HANDSHAKE_TIMEOUT_S):
                await self._shake_hands(connection)
            while True:
                await self._serve(connection, await protocol.read(reader, protocol.MAX_REQUEST_BYTES))
        except (KVTransferError, TimeoutError, OSError) as error:
            log.debug("a receiver's connection has ended: %r", error)
        except asyncio.CancelledError:
            pass  # by our `close`; asyncio's streams would log it
        except Exception:  # a bug of ours must not end the service of all others
            log.exception("a request of a receiver failed in an unforeseen way")
        finally:
            del self._connections[connection]
            writer.transport.abort()

    async def _shake_hands(self, connection: _Connection) -> None:
        await protocol.let_in(connection.reader, connection.writer, self._settings.secret)
        pool = self._pool
        protocol.write(
            connection.writer,
            protocol.WELCOME,
            self._engine_description,
            protocol.POOL.pack(pool.address, pool.block_bytes, pool.num_blocks),
            protocol.LOAN_S.pack(self._loan_s),
        )

    async def _serve(self, connection: _Connection, message: Sequence[bytes]) -> None:
        match message:
            case [protocol.FETCH, request, transfer, *keys] if connection.may_ask(request):
                await self._lend(connection, request, _transfer_id(transfer), [BlockKey(key) for key in keys])
            case [protocol.DONE, request]:
                if loan := connection.loans.pop(request, None):
                    self._take_back(loan)
            case [protocol.RELEASE, transfer]:
                self._source.released(_transfer_id(transfer))
            case [protocol.KEEP_ALIVE, transfer]:
                self._source.keep_alive(_transfer_id(transfer))
            case _:
                raise protocol.BadMessage(f"{message[0][:16]!r} with {len(message)} fields")

    async def _lend(
        self, connection: _Connection, request: bytes, transfer_id: TransferId, keys: Sequence[BlockKey]
    ) -> None:
        loan = connection.loans[request] = _Loan(transfer_id)
        self._loans.add(loan)
        self._lending(True)
        loan.end = asyncio.get_running_loop().call_later(self._loan_s, self._expire, connection, request, loan)
        for index, key in enumerate(keys):
            self._answer(connection, request, index, loan, key)
            async with asyncio.timeout(_STALL_TIMEOUT_S):  # a receiver that does not read must not fill our buffers
                await connection.writer.drain()
            await asyncio.sleep(0)

    def _answer(self, connection: _Connection, request: bytes, index: int, loan: _Loan, key: BlockKey) -> None:
        writer, place = connection.writer, protocol.number(index)
        frame = None
        if loan in self._loans and connection.num_lent < _MAX_LENT_PER_CONNECTION:
            frame = self._source.borrow(loan.transfer_id, key)
        if frame is None:
            protocol.write(writer, protocol.ABSENT, request, place)
            return
        block = self._pool.block_at(frame.payload)
        if block is not None and key not in loan.keys:
            loan.keys.append(key)
            protocol.write(writer, protocol.LENT, request, place, frame.header, protocol.number(block))
        else:
            protocol.write(writer, protocol.INLINE, request, place, frame.header, frame.payload)
            self._source.give_back(loan.transfer_id, key)

    def _expire(self, connection: _Connection, request: bytes, loan: _Loan) -> None:
        connection.loans.pop(request, None)
        if loan.keys:
            log.warning("a receiver kept %d blocks longer than it may; they are taken back", len(loan.keys))
        self._take_back(loan)

    def _take_back(self, loan: _Loan) -> None:
        self._loans.discard(loan)
        if not self._loans:
            self._lending(False)
        if loan.end is not None:
            loan.end.cancel()
        keys, loan.keys = loan.keys, []
        for key in keys:
            self._source.give_back(loan.transfer_id, key)


def _transfer_id(field: bytes) -> TransferId:
    return TransferId(field.decode(errors="replace"))
