"""Policies: small interchangeable decisions, the same classes in production and in the benchmarks."""
