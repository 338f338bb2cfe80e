"""`python -m nccl_ep.memory`: how much device memory a group takes, and its caller's tensors.

Nothing is measured, and neither a GPU nor the library is needed: the first comes from the layouts of the
library's windows, buffers and handles (src/backend/cuda/ll/plan.rs, ht/plan.rs, and on several nodes
ll/network.rs, ht/nodes/), the second from the shapes in the header. A test runs the library and compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
from collections.abc import Iterable

MIB = 1 << 20
PAGE = 2 * MIB  # the driver's unit of allocation, and of a window
_REGION = 256
# Both modes.
MOST_TOP_K = 32
_PACKET, _ID, _WORD = 8, 8, 4
_SELF_TEST_SLOT = 4096
# Low latency: banks of a window and their rows, the bytes that one arrival flag covers, channels.
_BANKS, _LINE, _CHUNK, _CHANNELS = 4, 128, 512, 3
_LL_COUNTS, _LL_HEAD = 3, 32
# Banks of views of rank-major rows, on one node, and the most ranks that have one there.
_VIEWS, _MOST_PEERS = 2, 72
# High throughput: slots of all rings into a rank, and the most bytes of them.
_RING_SLOTS, _LEAST_DEPTH, _RING_BYTES = 2048, 64, 68 * MIB
# A slot has two units; one has room for half a row, and for its scales and what belongs to them.
_UNITS, _UNIT_ALIGN, _SCALES_OF_BOUND, _STAMP = 2, 128, 64, 16
_HT_COUNTS, _HT_HEAD, _HT_ENTRY, _ORIGIN = 2, 32, 8, 8
# Rows that go straight to memory that peers map: packets of an offer, ids and weights of a row beside which scales lie,
# and the most bytes of all that lies beside rows.
_OFFER, _SIDE_ENTRIES, _SIDE_BYTES, _SIDE_ALIGN = 6, 8, 16 * MIB, 16
# Rows that lie by expert: experts that a packet tells of, and the most rows of groups that have room for that.
_ZONE_EXPERTS, _ZONE_ROWS = 26, 1 << 20
# Over several nodes: passes of an operation and their least and most bytes, where each node has one
# rank and otherwise.
_ALONE, _WITH_OTHERS = (2, 16 * MIB, 32 * MIB), (8, 4 * MIB, 16 * MIB)
_MOST_CHUNKS = 16


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
    # Ranks of each node; empty for one node.
    nodes: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.element_bytes

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        return self.nodes or (self.ranks,)


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of the answer: `parts` allocations that have `bytes` together."""

    name: str
    bytes: int
    shape: str = ""
    parts: int = 1

    @property
    def pages(self) -> int:
        """Bytes of the pages that the driver takes for it if none is shared."""
        return self.parts * _up(-(-self.bytes // self.parts), PAGE)


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the first rank of a node is to the others. No rank of the node needs more than it."""

    locals: int  # ranks of the node
    others: int  # other nodes
    sources: int  # ranks that it forwards for, itself included

    @classmethod
    def of(cls, sizes: tuple[int, ...], node: int) -> _Place:
        size = sizes[node]
        # A rank's rail peer has its local index, modulo the ranks there.
        others = sum(-(-other // size) for number, other in enumerate(sizes) if number != node)
        return cls(size, len(sizes) - 1, 1 + others)


def library(shape: Shape) -> list[Item]:
    """What ncclEpCreateGroup and one handle allocate on the rank that needs most. Small ones share a
    page, and a later handle takes the memory of a destroyed one."""
    sizes = shape.ranks_of_nodes
    of_mode = _ll if shape.algorithm == "ll" else _ht
    of_nodes = (of_mode(shape, _Place.of(sizes, node)) for node in range(len(sizes)))
    most = max(of_nodes, key=lambda items: sum(item.pages for item in items))
    return [*most, Item("group, small things", PAGE)]


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


def views(shape: Shape) -> int:
    """Bytes that the library takes with the first view of rank-major rows."""
    return _up(_VIEWS * _up(shape.ranks * shape.tokens * shape.row_bytes, _REGION), PAGE)


def expected_rows(shape: Shape) -> float:
    """Rows that a rank receives in HT if experts are equally popular: how many tensors need with
    max_tokens_per_rank = NCCL_EP_AUTO."""
    others = shape.experts - shape.local_experts
    missed = math.comb(others, shape.top_k) / math.comb(shape.experts, shape.top_k)
    return shape.ranks * shape.tokens * (1 - missed)


def _ll(shape: Shape, place: _Place) -> list[Item]:
    entries = shape.tokens * shape.top_k
    handle = _WORD * (entries * (place.sources + shape.ranks) + shape.ranks)
    items = [_window(place, _ll_window(shape, place)), Item("open handles", handle)]
    if not place.others:
        return items
    most_entries = shape.tokens * MOST_TOP_K
    rows = _up(_LL_HEAD + shape.tokens * shape.row_bytes + most_entries * (_ID + _WORD), _REGION)
    weights = _up(_LL_HEAD + most_entries * _WORD, _REGION)
    remote = place.sources - 1
    channel = (remote + place.others) * rows + (remote + 1) * weights
    return [*items, *_words(place),
            Item("buffers for the network", _CHANNELS * channel, parts=_CHANNELS)]


def _ll_window(shape: Shape, place: _Place) -> int:
    rows = max(shape.ranks, place.locals * place.sources) * shape.tokens
    chunks = max(-(-shape.row_bytes // _CHUNK), 1)
    entries = shape.ranks * shape.tokens * MOST_TOP_K
    bank = sum(_up(size, _REGION) for size in (
        rows * _up(shape.row_bytes, _LINE), rows * chunks * _PACKET,
        shape.ranks * (shape.local_experts + _LL_COUNTS) * _PACKET, 2 * entries * _PACKET))
    state = 0 if place.others else _up(_WORD * (3 * _VIEWS + 1 + _VIEWS * _MOST_PEERS), _REGION)
    return _BANKS * bank + _REGION + state


def _ht(shape: Shape, place: _Place) -> list[Item]:
    own = shape.tokens * shape.top_k
    if not place.others:
        counts = shape.ranks * (shape.local_experts + _HT_COUNTS) * _PACKET
        return [_window(place, _ht_window(shape, place, counts)),
                Item("open handles", own * _HT_ENTRY)]
    chunks, room = _passes(shape, place)
    counts = shape.ranks * (shape.local_experts + chunks + _HT_COUNTS) * _PACKET
    remote_tokens = (place.sources - 1) * shape.tokens
    remote = remote_tokens * shape.top_k
    handle = ((own + 2 * remote) * _HT_ENTRY + remote_tokens * _ORIGIN + own * _WORD
              + 2 * place.others * shape.tokens * _WORD)
    first_row = _up(room * MOST_TOP_K * (_ID + _WORD) + _HT_HEAD, _REGION)
    message = _up(first_row + room * shape.row_bytes, _REGION)
    banks = 2 * (place.sources - 1 + place.others) * message
    return [_window(place, _ht_window(shape, place, counts)), Item("open handles", handle),
            *_words(place), Item("banks for the network", banks),
            Item("ids of other nodes", _power_of_two(remote * _ID))]


def _ht_window(shape: Shape, place: _Place, counts: int) -> int:
    """`counts` are the bytes that a rank is told of a new handle."""
    unit = (-(-shape.row_bytes // 2) + -(-shape.row_bytes // _SCALES_OF_BOUND) + _STAMP
            + MOST_TOP_K * _PACKET)
    unit = _up(unit, _UNIT_ALIGN)
    wanted = max(_RING_SLOTS // max(place.locals - 1, 1), _LEAST_DEPTH)
    fitting = max(_RING_BYTES // (place.locals * _UNITS * unit), 4)
    depth = 1 << (min(wanted, fitting).bit_length() - 1)
    units = place.locals * _UNITS * depth
    rings = sum(_up(size, _REGION) for size in (
        2 * counts, units * _PACKET, units * _WORD, units * unit,
        _ht_zones(shape) * (1 if place.others else 2)))
    return rings + (_ht_mapped(shape) if not place.others and shape.ranks > 1 else 0)


def _ht_zones(shape: Shape) -> int:
    rows = shape.ranks * shape.tokens
    return rows * -(-shape.local_experts // _ZONE_EXPERTS) * _PACKET if rows <= _ZONE_ROWS else 0


def _ht_mapped(shape: Shape) -> int:
    row = _SIDE_ENTRIES * _PACKET + -(-shape.row_bytes // _SCALES_OF_BOUND)
    side = min(shape.tokens * _up(row, _SIDE_ALIGN), _SIDE_BYTES // (shape.ranks - 1))
    return sum(_up(size, _REGION) for size in (
        2 * shape.ranks * _OFFER * _PACKET, shape.ranks * _PACKET,
        (shape.ranks - 1) * (side // _SIDE_ALIGN * _SIDE_ALIGN)))


def _passes(shape: Shape, place: _Place) -> tuple[int, int]:
    """Chunks of an operation, and the most tokens of a rank in a pass of any handle."""
    token_bytes = shape.row_bytes * place.others
    alone = len(shape.ranks_of_nodes) == shape.ranks
    passes, least, most = _ALONE if alone else _WITH_OTHERS
    pass_bytes = min(max(-(-shape.tokens * token_bytes // passes), least), most)
    pass_tokens = max(pass_bytes // token_bytes, 1)
    chunks = min(max(-(-shape.tokens // pass_tokens), 1), _MOST_CHUNKS)
    return chunks, max(min(shape.tokens, max(pass_tokens, -(-shape.tokens // chunks))), 1)


def _words(place: _Place) -> list[Item]:
    """Over several nodes the ranks of one node tell each other that they leave, in windows of their own."""
    return [Item("window of words", PAGE)] if place.locals > 1 else []


def _window(place: _Place, operations: int) -> Item:
    beside = _REGION + place.locals * (_SELF_TEST_SLOT + 2 * _WORD)
    return Item("window of the group", _up(operations + beside, PAGE))


def _tensor(name: str, sizes: tuple[int, ...], element_bytes: int) -> Item:
    return Item(name, math.prod(sizes) * element_bytes, str(list(sizes)))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _print(title: str, items: Iterable[tuple[Item, int]]) -> None:
    items = list(items)
    print(title)
    for item, size in items:
        print(f"  {item.name:<24}{item.shape:<22}{size / MIB:>10.1f} MiB")
    print(f"  {'together':<46}{sum(size for _, size in items) / MIB:>10.1f} MiB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nccl_ep.memory", description="How much device memory a group takes on "
        "each GPU, and its caller's tensors. Needs no GPU.")
    for letter, name, default, text in (
            ("r", "ranks", 8, "in all"), ("t", "tokens", None, "max_tokens_per_rank (ll 128, ht 4096)"),
            ("d", "hidden", 7168, "elements of a row"), ("k", "top-k", 8, "experts of a token"),
            ("e", "experts", 256, "over all ranks"), ("b", "element-bytes", 2, "of rows")):
        shown = "" if default is None else " (%(default)s)"
        parser.add_argument(f"-{letter}", f"--{name}", type=_count, default=default, help=text + shown)
    parser.add_argument("-a", "--algorithm", choices=("ll", "ht"), default="ll", help="(ll)")
    parser.add_argument("-n", "--nodes", default="1",
                        help="how many, of as many ranks each, or the ranks of each, such as 3,1 (1)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got '{text}'")
    return int(text)


def _nodes(text: str, ranks: int) -> tuple[int, ...]:
    """The ranks of each node; empty for one node."""
    numbers = tuple(_count(word) for word in text.split(","))
    if len(numbers) == 1:
        if ranks % numbers[0]:
            raise argparse.ArgumentTypeError(
                f"expected a divisor of {ranks} ranks, or the ranks of each node, got '{text}'")
        numbers = numbers[0] * (ranks // numbers[0],)
    if sum(numbers) != ranks:
        raise argparse.ArgumentTypeError(f"expected {ranks} ranks together, got {sum(numbers)}")
    return numbers if len(numbers) > 1 else ()


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = _parser()
    chosen = parser.parse_args(words)
    try:
        nodes = _nodes(chosen.nodes, chosen.ranks)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--nodes: {error}")
    if chosen.experts % chosen.ranks:
        parser.error(f"--experts: expected a multiple of {chosen.ranks} ranks")
    if chosen.top_k > chosen.experts:
        parser.error(f"--top-k: expected at most {chosen.experts} experts")
    tokens = chosen.tokens or (128 if chosen.algorithm == "ll" else 4096)
    shape = Shape(chosen.algorithm, chosen.ranks, tokens, chosen.hidden, chosen.element_bytes,
                  chosen.top_k, chosen.experts, nodes)
    _print("The library, on each GPU, in whole pages:",
           ((item, item.pages) for item in library(shape)))
    _print("Tensors of the caller:", ((item, item.bytes) for item in tensors(shape)))
    if shape.algorithm == "ll":
        print(f"Views of rank-major rows, from the first one on: {views(shape) / MIB:.1f} MiB more of the library's.")
    else:
        print(f"With even experts a rank receives about {expected_rows(shape):.0f} rows, not "
              f"{shape.ranks * tokens}: NCCL_EP_AUTO allows tensors of the real number.")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `| head`
    main()
