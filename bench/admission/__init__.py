"""Replays of request traces: which eviction and admission policy pays off. See docs/policies.md."""
