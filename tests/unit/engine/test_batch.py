import torch

from kvasir.engine.batch import build_batch, decodes_first
from kvasir.engine.blocks import BlockId, slot_mapping
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Chunk, StepPlan


def request(name: str, prompt: list[int], outputs: list[int], blocks: list[int]) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        block_table=[BlockId(block) for block in blocks],
    )


def test_a_step_of_prefills_and_decodes() -> None:
    whole = request("whole", [10, 11, 12, 13, 14], [], [7, 2])
    decoding = request("decoding", [20, 21, 22], [23], [4, 9])
    resumed = request("resumed", [30, 31, 32], [33, 34, 35], [5, 1, 3])  # recomputes outputs too, in two chunks
    plan = StepPlan((Chunk(whole, 0, 5), Chunk(decoding, 3, 1), Chunk(resumed, 2, 3)))
    table = torch.arange(20.0)[:, None].repeat(1, 2), -torch.arange(20.0)[:, None].repeat(1, 2)
    chunks = decodes_first(plan)
    batch = build_batch(chunks, 4, [table, (table[1], table[0])], torch.device("cpu"))

    assert [chunk.request.request_id for chunk in chunks] == ["decoding", "whole", "resumed"]
    assert batch.num_decodes == 1
    assert batch.token_ids.tolist() == [23, 10, 11, 12, 13, 14, 32, 33, 34]
    cos, sin = batch.ropes[0]
    assert cos[:, 0].tolist() == [3, 0, 1, 2, 3, 4, 2, 3, 4]
    assert sin[:, 1].tolist() == [-3, 0, -1, -2, -3, -4, -2, -3, -4]
    assert torch.equal(batch.ropes[1][0], sin)
    assert batch.slot_mapping.tolist() == [
        *slot_mapping(decoding.block_table, range(3, 4), 4),
        *slot_mapping(whole.block_table, range(5), 4),
        *slot_mapping(resumed.block_table, range(2, 5), 4),
    ]
    assert batch.block_tables.tolist() == [[4, 0], [7, 2], [5, 1]]
    assert batch.seq_lens.tolist() == [4, 5, 5]
    assert batch.query_starts.tolist() == [0, 5, 8]
    assert batch.sampled_tokens.tolist() == [0, 5]


def test_decodes_alone() -> None:
    one, two = request("one", [1, 2], [], [0]), request("two", [3], [], [1])
    table = torch.zeros(4, 1), torch.zeros(4, 1)
    batch = build_batch([Chunk(one, 1, 1), Chunk(two, 0, 1)], 4, [table], torch.device("cpu"))
    assert batch.num_decodes == 2
    assert batch.query_starts.tolist() == [0]
    assert batch.token_ids.tolist() == [2, 3]
