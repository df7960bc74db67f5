"""Benchmarks: synthetic checkpoints, measurements beside the peers, the machine's limits, reports."""
