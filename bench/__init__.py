"""The reference engine of the tests and the benchmarks: not installed, imports hicache as any engine would."""
