"""Faults that people have met on other systems, each an experiment on hicache: the table is README.md here."""
