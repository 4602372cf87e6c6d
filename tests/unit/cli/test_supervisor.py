"""With real processes: small programs that say a line and wait, fail, or refuse to stop."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvasir.cli.child import Child, ChildSpec, describe_exit
from kvasir.cli.supervisor import ClusterFailed, RestartDelays, Supervisor
from tests.waiting import until, wait_until

SRC = str(Path(__file__).parents[3] / "src")
WAITS = "import time; print('here', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
)
FAILS = "import sys; print('first line'); print('the reason', file=sys.stderr); sys.exit(3)"
DEADLINE_S = 60.0


def spec(name: str, code: str, **fields: object) -> ChildSpec:
    environment = os.environ | {"PYTHONPATH": SRC}
    return ChildSpec(name=name, command=(sys.executable, "-c", code), environment=environment, **fields)  # type: ignore[arg-type]


class Record:
    """What was shown and said."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []
        self.said: list[str] = []

    def show(self, name: str, line: str) -> None:
        self.shown.append((name, line))


@pytest.fixture
def record() -> Record:
    return Record()


@asynccontextmanager
async def supervised(record: Record, *specs: ChildSpec, grace_s: float = DEADLINE_S) -> AsyncIterator[Supervisor]:
    delays = RestartDelays(first_s=0.05, longest_s=0.1)
    supervisor = Supervisor(specs, record.show, record.said.append, delays)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop(grace_s)
        assert not any(child.is_running for child in supervisor.children)


def is_alive(pid: int) -> bool:
    """A zombie counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_lines_come_under_the_name_and_the_order_of_stopping_holds(record: Record) -> None:
    specs = [spec("node", WAITS, stop_order=1), spec("store", WAITS, stop_order=2), spec("router", WAITS, stop_order=0)]
    async with supervised(record, *specs):
        await until(lambda: len(record.shown) == 3)
        assert set(record.shown) == {("node", "here"), ("store", "here"), ("router", "here")}
    assert record.said == ["stopping router", "stopping node", "stopping store"]


async def test_a_death_during_the_start_is_a_failure_with_the_last_lines(record: Record) -> None:
    async with supervised(record, spec("node", FAILS)) as supervisor:
        with pytest.raises(ClusterFailed, match=r"(?s)node ended \(exit status 3\).*the reason"):
            await asyncio.wait_for(asyncio.shield(supervisor.failure), DEADLINE_S)


async def test_a_node_that_dies_later_is_started_again(record: Record) -> None:
    async with supervised(record, spec("node", WAITS)) as supervisor:
        supervisor.heal()
        await until(lambda: len(record.shown) == 1)
        (child,) = supervisor.children
        first_pid = child.pid
        child.send(signal.SIGKILL)
        await until(lambda: len(record.shown) == 2)
        assert child.pid != first_pid
        assert record.said == ["node ended (killed by SIGKILL); starting it again in 0.05 s"]
        assert not supervisor.failure.done()


async def test_a_node_that_dies_again_and_again_waits_longer_each_time(record: Record) -> None:
    async with supervised(record, spec("node", WAITS)) as supervisor:
        supervisor.heal()
        for count in range(1, 4):
            await until(lambda: len(record.shown) == count)  # noqa: B023
            supervisor.children[0].send(signal.SIGKILL)
            await until(lambda: len(record.said) == count)  # noqa: B023
    delays = [line.rpartition(" in ")[2] for line in record.said[:3]]
    assert delays == ["0.05 s", "0.1 s", "0.1 s"]


async def test_a_node_that_cannot_be_started_again_yet_is_tried_again(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the memory that killed it is still short."""
    async with supervised(record, spec("node", WAITS)) as supervisor:
        supervisor.heal()
        await until(lambda: len(record.shown) == 1)
        with monkeypatch.context() as patch:

            async def no_memory(*_: object, **__: object) -> None:
                raise OSError(12, "Cannot allocate memory")

            patch.setattr(asyncio, "create_subprocess_exec", no_memory)
            supervisor.children[0].send(signal.SIGKILL)
            await until(lambda: len(record.said) >= 2)
        await until(lambda: len(record.shown) == 2)
    assert record.said[:2] == [
        "node ended (killed by SIGKILL); starting it again in 0.05 s",
        "node cannot be started (Cannot allocate memory); trying again in 0.1 s",
    ]


async def test_a_router_that_dies_ends_it_all(record: Record) -> None:
    async with supervised(record, spec("router", WAITS, can_restart=False)) as supervisor:
        supervisor.heal()
        await until(lambda: len(record.shown) == 1)
        supervisor.children[0].send(signal.SIGKILL)
        with pytest.raises(ClusterFailed, match="router ended"):
            await asyncio.wait_for(asyncio.shield(supervisor.failure), DEADLINE_S)


async def test_what_does_not_stop_in_time_is_killed(record: Record) -> None:
    async with supervised(record, spec("node", STUBBORN), grace_s=0.3):
        await until(lambda: len(record.shown) == 1)
    assert record.said == ["stopping node", "node did not stop within 0.3 s and was killed"]


async def test_a_second_signal_kills_what_is_still_stopping(record: Record) -> None:
    async with supervised(record, spec("node", STUBBORN), grace_s=DEADLINE_S) as supervisor:
        await until(lambda: len(record.shown) == 1)
        asyncio.get_running_loop().call_later(0.1, supervisor.kill)
    assert record.said == ["stopping node"]


def test_a_child_cannot_outlive_a_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    write_pid = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    parent_code = (
        "import asyncio, os, sys\n"
        "from kvasir.cli.child import Child, ChildSpec\n"
        f"command = (sys.executable, '-c', {write_pid + '; time.sleep(600)'!r})\n"
        "async def main():\n"
        "    await Child(ChildSpec(name='c', command=command, environment=os.environ), print).start()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], env=os.environ | {"PYTHONPATH": SRC})
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
        pid = int(pid_file.read_text())
        assert is_alive(pid)
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
    wait_until(lambda: not is_alive(pid))


async def test_long_output_without_a_line_end_is_shown_too(record: Record) -> None:
    child = Child(spec("node", "print('x' * 200_000, end='')"), record.show)
    await child.start()
    await asyncio.wait_for(child.wait(), DEADLINE_S)
    assert sum(len(line) for _, line in record.shown) == 200_000


def test_describe_exit() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(3) == "exit status 3"
