"""Tests against the real engines, each in an environment of its own: `make engines`."""
