"""How fast codecs are on given blocks, beside a plain copy of them in the same rounds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvasir.bench.lab.machine import Quiet
from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import BlockHeader, BlockKey
from kvasir.kv_connector.codec import decode, encode

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one codec, in bytes of the block; medians over the rounds. Ratios to a copy: above 1 is faster."""

    size: float  # of the payload, as a share of the block
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    encode_ratio: float
    decode_ratio: float

    @property
    def pays_below_bits_per_s(self) -> float:
        """The bandwidth below which encode, send, decode, one after the other, take less time than sending as it is."""
        return 8 * (1 - self.size) / (1 / self.encode_bytes_per_s + 1 / self.decode_bytes_per_s)


def measure_speed(
    blocks: Sequence[bytes], layout: KVLayout, codecs: Sequence[str], num_rounds: int, quiet: Quiet
) -> dict[str, Speed]:
    """One thread. All work takes turns in every round; the first round warms up and does not count."""
    works, payload_bytes = _works(blocks, layout, codecs)
    times = {name: np.zeros(num_rounds + 1) for name in works}
    for round_number in range(num_rounds + 1):
        quiet.look()
        for name, work in works.items():
            times[name][round_number] = _seconds(work)
    times = {name: taken[1:] / len(blocks) for name, taken in times.items()}

    def bytes_per_s(name: str) -> float:
        return layout.bytes_per_block / float(np.median(times[name]))

    def ratio(name: str) -> float:
        return float(np.median(times["copy"] / times[name]))

    return {
        codec: Speed(
            size=payload_bytes[codec] / len(blocks) / layout.bytes_per_block,
            encode_bytes_per_s=bytes_per_s(f"encode {codec}"),
            decode_bytes_per_s=bytes_per_s(f"decode {codec}"),
            encode_ratio=ratio(f"encode {codec}"),
            decode_ratio=ratio(f"decode {codec}"),
        )
        for codec in codecs
    }


def _works(
    blocks: Sequence[bytes], layout: KVLayout, codecs: Sequence[str]
) -> tuple[dict[str, list[Work]], dict[str, int]]:
    """What is to be timed, a piece for each block; and how many bytes each codec makes of all."""
    views = [memoryview(block) for block in blocks]
    touched = [np.zeros(len(block), np.uint8) for block in blocks]
    works: dict[str, list[Work]] = {
        "copy": [_copy(view, to) for view, to in zip(views, touched, strict=True)],
    }
    payload_bytes = {}
    for codec in codecs:
        payloads = [encode(codec, view, layout) for view in views]
        payload_bytes[codec] = sum(payload.nbytes for payload in payloads)
        works[f"encode {codec}"] = [_encode(codec, view, layout) for view in views]
        works[f"decode {codec}"] = [_decode(codec, payload, layout) for payload in payloads]
    return works, payload_bytes


def _copy(view: memoryview, to: np.ndarray) -> Work:
    return lambda: np.copyto(to, np.frombuffer(view, np.uint8))


def _encode(codec: str, view: memoryview, layout: KVLayout) -> Work:
    return lambda: encode(codec, view, layout)


def _decode(codec: str, payload: memoryview, layout: KVLayout) -> Work:
    header = BlockHeader(
        kv_identity=b"",
        layout=layout,
        key=BlockKey(b""),
        num_tokens=layout.block_size,
        payload_bytes=payload.nbytes,
        checksum=0,
        sender_epoch="",
        codec=codec,
    )
    return lambda: decode(header, payload, layout)


def _seconds(works: Sequence[Work]) -> float:
    started_s = time.perf_counter()
    for work in works:
        work()
    return time.perf_counter() - started_s
