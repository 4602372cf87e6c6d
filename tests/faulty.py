"""Connectors of a test cluster that misbehave by a script, which can be changed while the cluster runs.

A node takes one by its path, `--connector tests.faulty:FaultyTcp`, and its script from the variable KVASIR_TEST_FAULTS:
a JSON list such as [{"kind": "flip", "block": 3}], or @ and the name of a file that holds one. The file is read again
whenever it has changed; blocks are counted from there.
"""

import json
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvasir.kv_connector.base import Frame, Land
from kvasir.kv_connector.redis.connector import RedisConnector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage.connector import SharedStorageConnector
from kvasir.kv_connector.tcp.connector import TcpConnector
from kvasir.kv_connector.testing.faulty import Fault, Faulty

VARIABLE = "KVASIR_TEST_FAULTS"


class Script:
    """A file that a running cluster reads its faults from."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write([])

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: f"@{self._path}"}

    @contextmanager
    def playing(self, *faults: Fault) -> Iterator[None]:
        self._write(faults)
        try:
            yield
        finally:
            self._write([])

    def _write(self, faults: Sequence[Fault]) -> None:
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps([asdict(fault) for fault in faults]))
        aside.rename(self._path)


class _Scripted(Faulty):
    _found = ""

    def fetch(self, *what: Any, land: Land | None = None) -> AsyncGenerator[tuple[Any, Frame | None]]:
        found = os.environ.get(VARIABLE, "[]")
        if found.startswith("@"):
            path = Path(found[1:])
            found = f"{path.stat().st_mtime_ns} {path.read_text()}"
        if found != self._found:
            self._found = found
            self.faults.set([Fault(**fault) for fault in json.loads(found[found.index("[") :])])
        return super().fetch(*what)


class FaultyTcp(_Scripted):
    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(TcpConnector(settings))


class FaultyRedis(_Scripted):
    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(RedisConnector(settings))


class FaultySharedStorage(_Scripted):
    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(SharedStorageConnector(settings))
