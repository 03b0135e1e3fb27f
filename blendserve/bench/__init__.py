"""Speed on this machine: compared cases run interleaved in one process, and ratios are computed round by round.

    config -> model -> workload (a prompt of real text) -> groups of cases -> samples -> tables, JSON, plot

docs/research/benchmarks.md describes how each figure is measured.
"""
