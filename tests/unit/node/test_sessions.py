import asyncio

import pytest

from kvasir.common.hashing import BlockHash, routing_key
from kvasir.node import kv_feed
from kvasir.node.event_log import EventLog
from kvasir.node.kv_feed import KVFeed, KVMirror
from kvasir.node.session import GRACE_S, Session, Sessions
from kvasir.proto import common_pb2


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.ended: list[str] = []
        self.sessions = Sessions(KVMirror(), lambda one: self.ended.append(one.session_id), lambda: self.now_s)

    def open(self, session_id: str, last_event: int = 0) -> tuple[Session, bool]:
        return self.sessions.open(session_id, last_event)


async def test_a_session_survives_its_stream_for_the_grace_time() -> None:
    world = World()
    session, resumed = world.open("router-a/1")
    assert not resumed
    world.sessions.detach(session, session.stream)
    world.now_s += GRACE_S - 0.1
    world.sessions.expire()
    assert world.ended == []
    again, resumed = world.open("router-a/1")
    assert resumed
    assert again is session
    world.now_s += 2 * GRACE_S
    world.sessions.expire()
    assert world.ended == [], "it is connected"


async def test_when_the_grace_is_over_it_ends_once() -> None:
    world = World()
    session, _ = world.open("router-a/1")
    world.sessions.detach(session, session.stream)
    world.now_s += GRACE_S
    world.sessions.expire()
    world.sessions.expire()
    assert world.ended == ["router-a/1"]
    assert session.has_ended
    again, resumed = world.open("router-a/1")
    assert not resumed
    assert again is not session


async def test_a_new_session_of_the_same_router_ends_the_old_one_at_once() -> None:
    world = World()
    world.open("router-a/1")
    world.open("router-b/1")
    world.open("router-a/2")
    assert world.ended == ["router-a/1"]
    assert len(world.sessions) == 2


async def test_plain_session_ids_are_routers_of_their_own() -> None:
    world = World()
    world.open("one")
    world.open("two")
    assert world.ended == []


async def test_a_resume_that_names_forgotten_events_begins_anew() -> None:
    world = World()
    session, _ = world.open("router-a/1")
    for _ in range(3):
        session.log.add_step(common_pb2.StepOutput(step=1))
        session.log.next_event()
    session.log.acknowledge(2)
    again, resumed = world.open("router-a/1", last_event=1)
    assert not resumed
    assert again is not session
    assert world.ended == ["router-a/1"]
    assert again.log.last_number == 0


async def test_the_older_stream_of_a_session_cannot_detach_it() -> None:
    world = World()
    session, _ = world.open("router-a/1")
    older = session.stream
    world.open("router-a/1")
    world.sessions.detach(session, older)
    assert session.detached_at_s is None
    assert session.changed.is_set(), "the older stream is woken, so that it ends"


async def test_commands_that_come_twice_count_once() -> None:
    session = Session("router-a/1", KVMirror())
    assert [session.is_new_command(number) for number in (1, 2, 2, 1, 0, 3)] == [True, True, False, False, True, True]
    assert session.last_command == 3


async def test_telling_wakes_the_writer() -> None:
    session = Session("router-a/1", KVMirror())
    waiting = asyncio.create_task(session.changed.wait())
    await asyncio.sleep(0)
    session.tell(common_pb2.StepOutput(step=1))
    async with asyncio.timeout(60):
        await waiting


def names(*texts: str) -> list[BlockHash]:
    """Of eight bytes and more, as those of real blocks."""
    return [BlockHash(text.encode().ljust(8)) for text in texts]


def keys(*texts: str) -> set[int]:
    return set(map(routing_key, names(*texts)))


def test_kv_changes_gather_and_the_later_one_counts() -> None:
    mirror = KVMirror()
    feed = KVFeed(mirror)
    assert not feed.has_news
    for stored, dropped in ((["a", "b"], []), ([], ["a", "x"]), (["x"], [])):
        changes = names(*stored), names(*dropped)
        mirror.apply(*changes)
        feed.add(*changes)
    assert feed.has_news
    (events,) = feed.take()
    assert set(events.stored_keys) == keys("b", "x")
    assert set(events.dropped_keys) == keys("a")
    assert (events.first_sequence, events.snapshot) == (1, False)
    assert feed.take() == []
    assert not feed.has_news
    assert mirror.num_leading(names("b", "x", "a")) == 2


def test_a_snapshot_is_all_there_is_even_if_that_is_nothing() -> None:
    mirror = KVMirror()
    feed = KVFeed(mirror)
    feed.ask_snapshot()
    (empty,) = feed.take()
    assert empty.snapshot
    assert not empty.stored_keys
    mirror.apply(names("a"), [])
    feed.add(names("a"), [])
    feed.ask_snapshot()
    (events,) = feed.take()
    assert events.snapshot
    assert set(events.stored_keys) == keys("a")
    assert events.first_sequence == 2


def test_a_session_that_finds_something_cached_begins_with_a_snapshot() -> None:
    mirror = KVMirror()
    mirror.apply(names("a", "b"), [])
    feed = KVFeed(mirror)
    mirror.apply(names("c"), names("a"))
    feed.add(names("c"), names("a"))
    (events,) = feed.take()
    assert events.snapshot
    assert set(events.stored_keys) == keys("b", "c")
    assert not events.dropped_keys


def test_a_large_snapshot_goes_in_pieces_and_only_the_first_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "_MAX_ENTRIES", 100)
    mirror = KVMirror()
    mirror.apply(names(*map(str, range(250))), [])
    messages = KVFeed(mirror).take()
    assert [(one.first_sequence, one.snapshot, len(one.stored_keys)) for one in messages] == [
        (1, True, 100),
        (2, False, 100),
        (3, False, 50),
    ]


def test_so_many_changes_that_the_whole_is_shorter_become_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that reads nothing for long costs no more memory than the cache has blocks."""
    monkeypatch.setattr(kv_feed, "_MAX_ENTRIES", 100)
    mirror = KVMirror()
    feed = KVFeed(mirror)
    for number in range(300):
        changes = names(str(number)), names(str(number - 10))
        mirror.apply(*changes)
        feed.add(*changes)
    (events,) = feed.take()
    assert events.snapshot
    assert len(events.stored_keys) == 10


def test_while_a_log_is_full_changes_wait_and_merge() -> None:
    """A router that acknowledges nothing: its log grows no further, and what it hears then is what holds by then."""
    mirror = KVMirror()
    session = Session("router/1", mirror)
    session.log = EventLog(max_kept=3)
    for number in range(1000):
        changes = names(str(number)), names(str(number - 1))
        mirror.apply(*changes)
        session.tell_cached(*changes)
        session.flush_kv_feed()
        session.log.next_event()
    assert session.log.num_kept == 3
    session.log.acknowledge(3)
    session.flush_kv_feed()
    event = session.log.next_event()
    assert event is not None
    assert set(event.kv_events.stored_keys) == keys("999")
    assert session.log.next_event() is None
