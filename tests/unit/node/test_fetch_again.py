"""A request that had to give its blocks away fetches them once more from the store that still has them."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvasir.engine.request import Request, RequestId
from kvasir.kv_connector.settings import ConnectorSettings
from tests.unit.node.fakes import (
    WITHIN_S,
    Running,
    continue_decode,
    decode,
    generate,
    prefill,
    progress,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)

NUM_TOKENS = 30


async def hand_over(sender: Running, receiver: Running, handle: int, prompt: list[int]) -> None:
    ticket = ticket_for(sender, f"t{handle}")
    await sender.send(**start_prefill(handle, request(prompt, NUM_TOKENS), ticket))
    await sender.until(lambda: sender.is_committed(handle))
    await receiver.send(**start_decode(handle, request(prompt, NUM_TOKENS), ticket))
    await receiver.send(**continue_decode(handle, sender.outputs[handle]))
    await receiver.until(lambda: handle in receiver.admitted)


def empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_preempted_requests_fetch_again_or_compute(tmp_path: Path, is_deleted: bool) -> None:
    """Two that do not fit together, without a prefix cache to come back to. They were seen to hang where the first
    transfer was taken for the only one; and where the entry was gone by then."""
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path))
    prompts = {1: list(range(20)), 2: list(range(100, 121))}
    async with (
        prefill(settings) as sender,
        decode(settings, num_blocks=16, enable_prefix_caching=False) as receiver,
    ):
        both_are_here = threading.Event()
        receiver.runner.before_step = lambda: both_are_here.wait(WITHIN_S)
        for handle, prompt in prompts.items():
            await hand_over(sender, receiver, handle, prompt)
        for handle in prompts:
            await receiver.send(**progress(handle, sender.progress[handle].num_blocks, True))
        await receiver.until(lambda: set(receiver.transfers) == set(prompts))
        if is_deleted:
            empty(tmp_path)
        both_are_here.set()
        for handle, prompt in prompts.items():
            await receiver.ends(handle)
            whole = generate(prompt, NUM_TOKENS)
            assert sender.outputs[handle] + receiver.outputs[handle] == whole
        stats = receiver.node.engine.stats()
        assert stats.num_refetches > 0
        assert stats.num_refetches == stats.num_preemptions
        assert (stats.num_recomputed_tokens > 0) == is_deleted


async def test_what_was_stored_only_later_is_no_recomputed_token(tmp_path: Path) -> None:
    """It was never asked for: these tokens were computed here from the first, and are again."""
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path))
    prompts = {1: list(range(20)), 2: list(range(100, 121))}

    async def store(num_tokens: int) -> None:
        async with prefill(settings) as sender:
            for handle, prompt in prompts.items():
                ticket = ticket_for(sender, f"t{handle}")
                await sender.send(**start_prefill(handle, request(prompt[:num_tokens], 8), ticket))
                await sender.until(lambda handle=handle: sender.is_committed(handle))  # type: ignore[misc]

    await store(8)
    async with decode(settings, num_blocks=16, enable_prefix_caching=False) as receiver:
        for handle, prompt in prompts.items():
            await receiver.send(**start_decode(handle, request(prompt, NUM_TOKENS)))
        await receiver.until(lambda: set(receiver.transfers) == set(prompts))
        await store(20)
        for handle in prompts:
            await receiver.send(**continue_decode(handle, []))
        for handle, prompt in prompts.items():
            await receiver.ends(handle)
            assert receiver.outputs[handle] == generate(prompt, NUM_TOKENS)
        stats = receiver.node.engine.stats()
        assert stats.num_refetches > 0
        assert stats.num_recomputed_tokens == 0


async def test_no_more_is_stored_than_was_asked_for(tmp_path: Path) -> None:
    """The store had a hole, so the second time only what lies before it was asked for; all of that has come."""
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path))
    one = Request(request_id=RequestId("s/1/0"), prompt_token_ids=[1] * 40)
    async with decode(settings) as receiver:
        block_size = receiver.node.limits.block_size
        for num_awaited, lost, stored in ((40, {1}, 1), (block_size, set[int](), 1)):
            one.num_awaited_tokens = num_awaited
            receiver.node.loader._note_stored(SimpleNamespace(request=one), lost)
            assert one.num_stored_tokens == stored * block_size
