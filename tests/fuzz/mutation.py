"""Inputs like sound ones: bytes changed, cut out, repeated, exchanged, and numbers at the edge of a type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
PIECES = (
    *(n.to_bytes(8, "little") for n in NUMBERS), b"\xdc\x0f\x00" * 1300, b"\xdf\x7f\xff\xff\xff",
    b"\xc1", b"[" * 2000, b"{\"a\":" * 1000, b"1e999", b"-1", b"9" * 5000, b"NaN", b"null", b"\"\"", b"\n",
    b"\0", b"%00", b"\xff\xfe", b"'", b"\xed\xa0\x80", b"true",
)  # fmt: skip


def mutations(seeds: Sequence[bytes], count: int, max_bytes: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` inputs; the same arguments give the same inputs."""
    random = Random(seed)
    for _ in range(count):
        data = bytearray(random.choice(seeds))
        for _ in range(random.choice((1, 1, 1, 2, 4, 12))):
            _mutate(data, seeds, random)
        yield bytes(data[:max_bytes])


def _mutate(data: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    at, size = random.randint(0, len(data)), random.choice((1, 1, 2, 4, 8, 32))
    match random.randrange(8):
        case 0:
            data[at : at + 1] = random.randbytes(1)
        case 1:
            if at < len(data):
                data[at] ^= 1 << random.randrange(8)
        case 2:
            del data[at : at + size]
        case 3:
            data[at:at] = data[at : at + size] * random.randint(1, 4)
        case 4:
            piece = random.choice(PIECES)
            data[at : at + len(piece) * random.randint(0, 1)] = piece
        case 5:
            number = random.choice(NUMBERS).to_bytes(8, random.choice(("little", "big")))
            data[at : at + size] = number[:size]
        case 6:
            other = random.choice(seeds)
            begin = random.randint(0, len(other))
            data[at : at + size] = other[begin : begin + size]
        case _:
            del data[at:]
