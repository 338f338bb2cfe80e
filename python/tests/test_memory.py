"""The sizes of groups and tensors, and the command that prints them. What the library really allocates is
compared elsewhere."""

import re

import pytest

from nccl_ep import memory
from nccl_ep.memory import MIB, Item, Shape, expected_rows, library


def total(shape: Shape) -> float:
    return sum(item.pages for item in library(shape)) / MIB


def together(text: str) -> list[float]:
    """The sums that the command prints."""
    return [float(number) for number in re.findall(r"^  together +(\S+) MiB$", text, re.M)]


def test_an_item_takes_whole_pages_for_each_part():
    assert Item("one", 1).pages == 2 * MIB
    assert Item("three", 3 * (2 * MIB + 1), parts=3).pages == 12 * MIB
    assert Item("three", 6 * MIB, parts=3).pages == 6 * MIB


def test_two_nodes_have_buffers_beside_the_window():
    one, two = Shape("ll", 2, 128), Shape("ll", 2, 128, nodes=(1, 1))
    assert {item.name for item in library(two)} - {item.name for item in library(one)} == {
        "buffers for the network"}
    # The target: at most 96 MiB beside NCCL's own.
    assert total(one) == 20 and total(two) == 32
    assert total(Shape("ll", 8, 128, nodes=(4, 4))) <= 96
    more = Shape("ll", 4, 128, nodes=(2, 2))
    assert {item.name for item in library(more)} - {item.name for item in library(two)} == {
        "window of words"}


def test_the_rank_that_carries_most_counts():
    """The one rank of a node takes what all three of the other send there."""
    for algorithm in ("ll", "ht"):
        assert (total(Shape(algorithm, 4, 2000, nodes=(3, 1)))
                == total(Shape(algorithm, 4, 2000, nodes=(1, 3))))
    assert total(Shape("ll", 4, 2000, nodes=(3, 1))) > total(Shape("ll", 4, 2000, nodes=(2, 2)))


def test_expected_rows():
    assert expected_rows(Shape("ht", 4, 100, top_k=8, experts=8)) == 400
    assert expected_rows(Shape("ht", 4, 100, top_k=1, experts=8)) == pytest.approx(100)


def test_the_command(capsys):
    memory.main(["--algorithm", "ll", "--ranks", "4", "--nodes", "3,1", "-t", "100", "-d", "512"])
    printed = capsys.readouterr().out
    shape = Shape("ll", 4, 100, 512, nodes=(3, 1))
    assert together(printed)[0] == total(shape)
    assert "buffers for the network" in printed and "[64, 400, 512]" in printed
    memory.main(["-a", "ht", "-r", "4", "-n", "2"])
    assert together(capsys.readouterr().out)[0] == total(Shape("ht", 4, 4096, nodes=(2, 2)))
    memory.main(["-a", "ht", "-r", "4"])
    assert together(capsys.readouterr().out)[0] == total(Shape("ht", 4, 4096))


@pytest.mark.parametrize("words, text", [
    (["--nodes", "3"], "--nodes: expected a divisor of 8 ranks, or the ranks of each node, got '3'"),
    (["--nodes", "3,1"], "--nodes: expected 8 ranks together, got 4"),
    (["--nodes", "two"], "--nodes: expected a whole number from 1 on, got 'two'"),
    (["--ranks", "0"], "--ranks: expected a whole number from 1 on, got '0'"),
    (["--experts", "9"], "--experts: expected a multiple of 8 ranks"),
    (["--top-k", "257"], "--top-k: expected at most 256 experts")])
def test_the_command_says_what_it_expects(capsys, words, text):
    with pytest.raises(SystemExit) as ended:
        memory.main(words)
    assert ended.value.code == 2 and text in capsys.readouterr().err
