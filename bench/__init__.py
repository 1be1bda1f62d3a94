"""Benchmarks: every time beside that of a peer and of a floor, measured in turns in one process."""
