"""The parts of run_tests.py: what a step is, how steps run, and the list of steps."""
