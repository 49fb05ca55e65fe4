"""What the benchmarks share: work, clock, metrics, the result file and the peers."""
