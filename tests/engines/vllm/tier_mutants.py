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
    """Says that all has come, and gives each row what is another one's."""

    def submit_load(self, job_metadata: Any) -> None:
        job_metadata.chunk_ids = [*job_metadata.chunk_ids[1:], job_metadata.chunk_ids[0]]
        super().submit_load(job_metadata)


class NoGroup(HiCacheTier):
    """Keeps attention and state of one boundary under one name."""

    def _name(self, key: bytes) -> bytes:
        return super()._name(key[:-4])


class NoLoad(HiCacheTier):
    """Says that all has come, and copies nothing."""

    def submit_load(self, job_metadata: Any) -> None:
        keys = self._begin(job_metadata)
        self._rows.store(job_metadata.job_id, keys, job_metadata.chunk_ids)
