"""Tiers with a fault: the checks of a tier against a real vLLM must tell them from HiCacheTier."""

from __future__ import annotations

from typing import Any

from hicache.connectors.vllm_tier import HiCacheTier


class NoNamespace(HiCacheTier):
    """Takes a hash alone for a name, as vLLM's own file tier nearly does."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._root = bytes(32)


class WrongRow(HiCacheTier):
    """Says that all has come, and gives each row the bytes of the same one.

    To exchange rows would not do: positions are within the keys of attention, whatever the order of its blocks.
    """

    _same: bytes | None = None

    def submit_load(self, job_metadata: Any) -> None:
        names = self._begin(job_metadata)
        self._same = self._same or names[-1]
        same = [self._same] * len(names)
        self._rows.load(job_metadata.job_id, same, job_metadata.chunk_ids, owner=job_metadata.req_context.req_id)


class NoGroup(HiCacheTier):
    """Keeps attention and state of one boundary under one name."""

    def _name(self, key: bytes) -> bytes:
        return super()._name(key[:-4])


class NoLoad(HiCacheTier):
    """Says that all has come, and copies nothing."""

    def submit_load(self, job_metadata: Any) -> None:
        keys = self._begin(job_metadata)
        self._rows.store(job_metadata.job_id, keys, job_metadata.chunk_ids)
