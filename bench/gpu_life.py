"""`python -m bench.gpu_life`: prompts of a hybrid model through all tiers, with L1 on a GPU, compared to the bit."""

from __future__ import annotations

import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing

import click
import torch
from rich.console import Console

from hicache import CacheSpec, HiCache, PagedGroup, PrefetchPolicy, StateField, StateGroup
from hicache.errors import HiCacheError
from hicache.moves import COPIES_SETTINGS
from hicache.sequence import Request

PAGE_TOKENS, PROMPT_PAGES, PROMPTS = 64, 12, 3
L1_PAGES, L1_STATES, L2_BYTES, L3_BYTES = 16, 4, 256 << 20, 1 << 30
TIMEOUT_S = 30.0
SPEC = CacheSpec(
    "gpu-life",
    "1",
    (
        PagedGroup("attention", layers=(3, 7), heads=8, head_dim=128, dtype="bfloat16"),
        StateGroup(
            "gdn",
            layers=(0, 1, 2, 4, 5, 6),
            fields=(StateField("conv", (3, 1024), "bfloat16"), StateField("temporal", (8, 64, 64), "float32")),
        ),
    ),
    page_tokens=PAGE_TOKENS,
)
ATTENTION, STATE = 0, 1


class Life:
    """An engine whose model writes made-up bytes, which are known wherever they come back."""

    def __init__(self, *, device: str, copies: str, l3: str) -> None:
        self._device = device
        self.cache = HiCache.open(
            SPEC,
            l1_pages=L1_PAGES,
            l1_state_slots=L1_STATES,
            l2_bytes=L2_BYTES,
            l3=l3,
            l3_capacity_bytes=L3_BYTES,
            device=device,
            copies=copies,
            prefetch=PrefetchPolicy("wait_complete", threshold_tokens=0),
            read_policy="always",
        )

    def close(self) -> None:
        """Everything is written down before."""
        self.cache.close(flush_timeout_s=TIMEOUT_S)

    def serve(self, number: int) -> str:
        """One prompt, restored, compared and computed to its end; returns the farthest tier that it came from."""
        tokens = [1_000_000 * (number + 1) + token for token in range(PROMPT_PAGES * PAGE_TOKENS + 1)]
        request = self.cache.match(tokens)
        self.cache.prefetch(request)
        self.cache.wait(request)
        restored = self.cache.load(request, timeout_s=TIMEOUT_S)
        assert restored is not None, "L1 has room for a prompt"
        self._compare(request, number, restored.tokens)
        self._compute(request, number, restored.tokens)
        self.cache.release(request)
        return next((tier for tier in ("l3", "l2", "l1") if restored.by_source[tier]), "computed")

    def flush(self) -> None:
        """L2 and L3 have everything. Raises HiCacheError."""
        if not self.cache.flush(timeout_s=TIMEOUT_S):
            raise HiCacheError(f"not written down within {TIMEOUT_S:g} s")

    def _compute(self, request: Request, number: int, start: int) -> None:
        end = PROMPT_PAGES * PAGE_TOKENS
        if start == end:
            return
        assert self.cache.extend(request, tokens=end, timeout_s=TIMEOUT_S), "L1 has room for a prompt"
        for held, wanted in self._bytes(request, number, range(start // PAGE_TOKENS, PROMPT_PAGES), end):
            held.copy_(wanted)
        self.cache.store(request, computed=end, state_at=end)

    def _compare(self, request: Request, number: int, restored: int) -> None:
        if not restored:
            return
        for held, wanted in self._bytes(request, number, range(restored // PAGE_TOKENS), restored):
            if not torch.equal(held.view(torch.uint8), wanted.view(torch.uint8)):
                raise HiCacheError(f"prompt {number} came back with other bytes than it was stored with")

    def _bytes(
        self, request: Request, number: int, pages: Sequence[int], state_at: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What L1 has of these pages and of the state, each with what it is to be."""
        table = request.page_table(ATTENTION)
        for page in pages:
            slot = table[page]
            assert slot is not None, "there is no window"
            held = self.cache.l1.paged[ATTENTION][:, slot]
            yield held, self._pattern(f"{number} page {page}", held)
        for name, field in self.cache.l1.state[STATE].items():
            held = field[:, request.state_slot(STATE)]
            yield held, self._pattern(f"{number} {name} at {state_at}", held)

    def _pattern(self, name: str, like: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(like.shape, generator=generator).to(like.dtype).to(self._device)


def live(device: str, copies: str) -> list[str]:
    """Where prompts came from: computed, after others from L2, at once again from L1, and in another engine from L3."""
    sources: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hicache-life-") as folder:
        for prompts in ((*range(PROMPTS), 0, 0), range(PROMPTS)):
            with closing(Life(device=device, copies=copies, l3=f"file://{folder}/l3")) as engine:
                for number in prompts:
                    sources.append(engine.serve(number))
                    engine.flush()
    return sources


EXPECTED = ["computed"] * PROMPTS + ["l2", "l1"] + ["l3"] * PROMPTS


@click.command()
@click.option("--device", default="cuda", show_default=True, help="Where L1 is: cuda, cuda:N or cpu.")
def main(device: str) -> None:
    """Serve prompts of a hybrid model from L1, L2 and L3 by each back end of the copies, and compare all bytes."""
    console = Console()
    if device != "cpu" and not torch.cuda.is_available():
        console.print("no CUDA device here: prompts were not served through the tiers of a GPU")
        sys.exit(3)
    failed = False
    for copies in COPIES_SETTINGS if device != "cpu" else ("auto", "reference", "direct"):
        start_s = time.monotonic()
        try:
            sources = live(device, copies)
            outcome = "ok" if sources == EXPECTED else f"came from {sources}, not {EXPECTED}"
        except (HiCacheError, RuntimeError, AssertionError) as error:
            outcome = f"{type(error).__name__}: {error}"
        failed |= outcome != "ok"
        console.print(f"{copies:10} {time.monotonic() - start_s:5.1f} s  {outcome}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
