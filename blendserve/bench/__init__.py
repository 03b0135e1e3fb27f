"""Measuring speed: what is compared runs interleaved in one process, and ratios are taken round by round.

    settings -> reader -> workload (a prompt of real text) -> contest (who runs it, over a store) -> figures -> tables

docs/research/benchmarks.md tells how each figure is measured.
"""
