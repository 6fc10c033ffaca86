"""Measurements of tlk_tracking: scripts/bench for a CPU, benchmarks/gpu.py for a GPU."""
