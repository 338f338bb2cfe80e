"""`python -m nccl_ep demo`: what it draws, and what it finds wrong."""

import subprocess
import sys

import pytest

from nccl_ep import demo

_RIGHT = [demo.Seen([2, 0, 1, 1], [[2, 1], [0, 1]], 0, 1e-6, "cpu"),
          demo.Seen([1, 1, 0, 2], [[1, 0], [1, 2]], 0, 0.0, "cpu")]
_PICTURE = """\
2 ranks on the CPU stand-ins; 16 tokens on each go to 2 of 4 experts and back

rows that came | rank 0 | rank 1 |
to expert      |  0   1 |  2   3 |  all
---------------------------------------
from rank 0    |  2   . |  1   1 |    4
from rank 1    |  1   1 |  .   2 |    4
all            |  3   1 |  1   3 |    8

rows at an expert they were not for: 0
weighted sums of 32 tokens: off by at most 1e-06 of the largest"""


def test_the_picture():
    assert demo.picture(_RIGHT) == _PICTURE


@pytest.mark.parametrize("change", [
    {"sent": [1, 1, 1, 1]}, {"came": [[1, 0], [2, 2]]}, {"misled": 1}, {"error": 0.1},
    {"error": float("nan")}])
def test_what_is_wrong(change):
    assert demo.is_right(_RIGHT)
    assert not demo.is_right([_RIGHT[0], _RIGHT[1]._replace(**change)])


def test_where_it_cannot_start():
    with pytest.raises(SystemExit, match="demo: ranks: must be 1 or more, not 0"):
        demo.run(0, stand_ins=True)


def test_as_a_program(alone):
    ran = subprocess.run([sys.executable, "-m", "nccl_ep", "demo", "--ranks", "1"],
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("PASSED\n")
    assert "\nfrom rank 0    | " in ran.stdout and "  32\n" in ran.stdout
