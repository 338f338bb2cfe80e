#!/usr/bin/env python3
"""How much device memory a group on the GPUs of one node takes, and how much its caller's tensors.

Nothing is measured: the first comes from the layouts of the library's windows and handles
(src/backend/cuda/ll/plan.rs, ht/plan.rs), the second from the shapes in the header. The self-test
compares the first with what runs have measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable

MIB = 1 << 20
_PAGE = 2 * MIB  # the driver's unit of allocation, and of a window
_REGION = 256
# Both modes.
_MOST_TOP_K = 32
_PACKET = 8
_SELF_TEST_SLOT = 4096
# Low latency: banks of a window, and the bytes that one arrival flag covers.
_BANKS, _CHUNK = 4, 2048
# High throughput: slots of all rings into a rank, and the most bytes of them.
_RING_SLOTS, _LEAST_DEPTH, _RING_BYTES = 2048, 64, 64 * MIB


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a group and the tensors depend on; `tokens` is max_tokens_per_rank."""

    algorithm: str
    ranks: int
    tokens: int
    hidden: int = 7168
    element_bytes: int = 2
    top_k: int = 8
    experts: int = 256

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.element_bytes

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of the answer."""

    name: str
    bytes: int
    shape: str = ""


def library(shape: Shape) -> list[Item]:
    """What ncclEpCreateGroup and one handle allocate. Small ones share a page, and a later one takes
    the memory of a destroyed one."""
    window = _ll_window(shape) if shape.algorithm == "ll" else _ht_window(shape)
    entries = shape.tokens * shape.top_k
    if shape.algorithm == "ll":
        handle = 4 * entries * (1 + shape.ranks)
    else:
        handle = 8 * entries
    return [Item("window of the group", _up(window + (1 + shape.ranks) * _SELF_TEST_SLOT, _PAGE)),
            Item("group, small things", _PAGE),
            Item("open handles", _up(handle, _PAGE))]


def tensors(shape: Shape) -> list[Item]:
    """What a forward layer of the caller needs; experts may work in place."""
    rows = ((shape.tokens, shape.hidden), shape.element_bytes)
    ids, weights = ((shape.tokens, shape.top_k), 8), ((shape.tokens, shape.top_k), 4)
    own = [_tensor("tokens", *rows), _tensor("ids", *ids), _tensor("weights", *weights),
           _tensor("combined", *rows)]
    slots = shape.ranks * shape.tokens
    if shape.algorithm == "ll":
        received = (shape.local_experts, slots, shape.hidden)
        return [*own, _tensor("received rows", received, shape.element_bytes),
                _tensor("counter", (shape.local_experts,), 4)]
    return [*own, _tensor("received rows", (slots, shape.hidden), shape.element_bytes),
            _tensor("received ids", (slots, shape.top_k), 8),
            _tensor("received weights", (slots, shape.top_k), 4)]


def expected_rows(shape: Shape) -> float:
    """Rows that a rank receives in HT if experts are equally popular: how many tensors need with
    max_tokens_per_rank = NCCL_EP_AUTO."""
    others = shape.experts - shape.local_experts
    missed = math.comb(others, shape.top_k) / math.comb(shape.experts, shape.top_k)
    return shape.ranks * shape.tokens * (1 - missed)


def _ll_window(shape: Shape) -> int:
    rows = shape.ranks * shape.tokens
    chunks = -(-shape.row_bytes // _CHUNK)
    bank = sum(_up(size, _REGION) for size in (
        rows * shape.row_bytes, rows * chunks * _PACKET,
        shape.ranks * (shape.local_experts + 2) * _PACKET, rows * _MOST_TOP_K * _PACKET))
    return _BANKS * bank + _REGION


def _ht_window(shape: Shape) -> int:
    slot = _up(shape.row_bytes + _MOST_TOP_K * 8, _REGION)
    wanted = max(_RING_SLOTS // max(shape.ranks - 1, 1), _LEAST_DEPTH)
    fitting = max(_RING_BYTES // (shape.ranks * slot), 4)
    depth = 1 << (min(wanted, fitting).bit_length() - 1)
    counts = 2 * shape.ranks * (shape.local_experts + 2) * _PACKET
    return counts + shape.ranks * depth * (_PACKET + 4 + slot)


def _tensor(name: str, sizes: tuple[int, ...], element_bytes: int) -> Item:
    return Item(name, math.prod(sizes) * element_bytes, str(list(sizes)))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _print(title: str, items: Iterable[Item]) -> None:
    items = list(items)
    print(title)
    for item in items:
        print(f"  {item.name:<22}{item.shape:<22}{item.bytes / MIB:>10.1f} MiB")
    print(f"  {'together':<44}{sum(item.bytes for item in items) / MIB:>10.1f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-a", "--algorithm", choices=("ll", "ht"), default="ll")
    parser.add_argument("-r", "--ranks", type=int, default=8)
    parser.add_argument("-t", "--tokens", type=int, help="max_tokens_per_rank (ll 128, ht 4096)")
    parser.add_argument("-d", "--hidden", type=int, default=7168)
    parser.add_argument("-k", "--top-k", type=int, default=8)
    parser.add_argument("-e", "--experts", type=int, default=256)
    parser.add_argument("-b", "--element-bytes", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.experts % chosen.ranks:
        parser.error(f"--experts: expected a multiple of {chosen.ranks} ranks")
    tokens = chosen.tokens or (128 if chosen.algorithm == "ll" else 4096)
    shape = Shape(chosen.algorithm, chosen.ranks, tokens, chosen.hidden, chosen.element_bytes,
                  chosen.top_k, chosen.experts)
    _print("The library, on each GPU:", library(shape))
    _print("Tensors of the caller:", tensors(shape))
    if shape.algorithm == "ht":
        print(f"With even experts a rank receives about {expected_rows(shape):.0f} rows, not "
              f"{shape.ranks * tokens}: NCCL_EP_AUTO allows tensors of the real number.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
