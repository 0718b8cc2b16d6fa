"""Engines as they are released, on hicache: one module for each, imported by that engine alone."""
