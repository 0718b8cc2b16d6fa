"""Metrics can be scraped from another host while what changes something stays private."""

from __future__ import annotations
