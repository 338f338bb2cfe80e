"""Grids that the library would not choose, for 3 ranks of 6 multiprocessors or more."""

from testing.step import ROOT

ODD_GRIDS = (("NCCL_EP_TUNING_FILE", str(ROOT / "c_tests" / "simt" / "odd_grids.json")),)
