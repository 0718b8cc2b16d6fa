"""vLLM's tiered offloading on a CPU, for tests: vLLM itself runs it on GPUs only.

All of it is vLLM's but the worker that copies between its KV cache and its CPU tier, which is a memcpy here.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies in the call, before it returns."""

    def __init__(self, caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        import torch

        self._groups = caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._ended: list[TransferResult] = []
        self._blocks = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        self._rows = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk) for each in caches.tensors
        ]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, into_rows=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, into_rows=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Any) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, into_rows: bool) -> bool:
        moved = next_block = next_chunk = 0
        for group, size in enumerate(blocks.group_sizes):
            if not size:
                continue
            skipped = blocks.block_indices[group] % self._blocks_per_chunk
            for index in range(size):
                position = skipped + index
                block = int(blocks.block_ids[next_block + index])
                chunk = int(chunks.block_ids[next_chunk + position // self._blocks_per_chunk])
                for part in self._groups[group]:
                    moved += self._copy_part(part, block, chunk, position % self._blocks_per_chunk, into_rows)
            next_chunk += -(-(size + skipped) // self._blocks_per_chunk)
            next_block += size
        self._ended.append(TransferResult(job_id, True, moved, 1e-6))
        return True

    def _copy_part(self, part: Any, block: int, chunk: int, place: int, into_rows: bool) -> int:
        page = self._blocks[part.tensor_idx].shape[1]
        in_block = self._blocks[part.tensor_idx][block, : part.page_size_bytes]
        in_row = self._rows[part.tensor_idx][chunk, place * page : place * page + part.page_size_bytes]
        (in_row.copy_(in_block) if into_rows else in_block.copy_(in_row))
        return int(part.page_size_bytes)


class CpuTieringSpec(TieringOffloadingSpec):
    """TieringOffloadingSpec with that worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
