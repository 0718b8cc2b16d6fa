"""No byte of a transient field gets below L1: a search of L2 and of the files of L3 for poison, field by field."""

from __future__ import annotations

import dataclasses
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.demo.processes import Daemon
from bench.tiny_engine import Busy, Generated, ScriptedDrafts, TinyEngine
from bench.tiny_hybrid import TinyHybrid
from bench.tiny_reference import reference_generate, restored_differences
from hicache import CacheSpec, HiCache, PrefetchPolicy, Request, Restored, SnapshotPolicy, StateGroup
from hicache.errors import StateNotCommitted
from tests.e2e.conftest import MIB, TENANTS

PREFETCH = PrefetchPolicy("wait_complete", hard_cap_s=20.0, threshold_tokens=0)


def poison_of(field: str) -> bytes:
    """Eight bytes that mean this field, and turn up nowhere by chance."""
    return blake2b(field.encode(), digest_size=8).digest()


def filled(field: torch.Tensor, name: str) -> torch.Tensor:
    """Poison in the shape of one slot of a field, [layers, *shape]."""
    slot = field[:, 0]
    raw = poison_of(name) * (slot.numel() * slot.element_size() // 8 + 1)
    return torch.frombuffer(bytearray(raw), dtype=slot.dtype)[: slot.numel()].reshape(slot.shape)


def occurrences(memory: bytes | memoryview | mmap.mmap, names: Sequence[str]) -> Counter[str]:
    """How often the poison of each field lies in ``memory``, at whatever alignment."""
    held = bytes(memory) if isinstance(memory, memoryview) else memory
    found: Counter[str] = Counter()
    for name in names:
        position = held.find(poison_of(name))
        while position >= 0:
            found[name] += 1
            position = held.find(poison_of(name), position + 8)
    return found


def occurrences_in_files(folder: Path, names: Sequence[str]) -> Counter[str]:
    """The same in all files below a folder, those of removed and unfinished objects too."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
                found += occurrences(held, names)
    return found


def transient_names(spec: CacheSpec) -> list[str]:
    groups = [group for group in spec.groups if isinstance(group, StateGroup)]
    return [field.name for group in groups for field in group.fields if field.transient]


class PoisonedL1:
    """A HiCache whose every state slot has poison in its transient fields, whatever the slot is used for.

    Slots that are free, hold a snapshot, were released or evicted: all, at every call. The live one of the request that
    runs is left alone while its ring is in use, and poisoned with the others when a snapshot is taken and at its end.
    """

    def __init__(self, cache: HiCache) -> None:
        self._cache = cache
        self._poison = {
            (index, name): filled(field, name)
            for index, fields in cache.l1.state.items()
            for name, field in fields.items()
            if name in transient_names(cache.spec)
        }
        self.restored_rings = 0
        self.poison(live=None)

    def __getattr__(self, name: str) -> Any:  # Any: whatever HiCache has
        return getattr(self._cache, name)

    def poison(self, *, live: Request | None) -> None:
        """Every slot but that of ``live``."""
        for (index, name), poison in self._poison.items():
            field = self._cache.l1.state[index][name]
            kept = None if live is None else live.state_slot(index)
            for slot in range(field.shape[1]):
                if slot != kept:
                    field[:, slot] = poison

    def load(self, request: Request, *, timeout_s: float = 0.0) -> Restored | None:
        """See HiCache.load. The rings of what was restored are empty, byte for byte."""
        restored = self._cache.load(request, timeout_s=timeout_s)
        if restored is not None:
            for index, name in self._poison:
                ring = self._cache.l1.state[index][name][:, request.state_slot(index)]
                assert not ring.contiguous().view(torch.uint8).any(), f"{name} after a restore"
                self.restored_rings += restored.tokens > 0
            self.poison(live=request)
        return restored

    def store(
        self,
        request: Request,
        *,
        computed: int,
        state_at: int | None = None,
        state_pending: int = 0,
        **options: Any,  # Any: whatever HiCache.store takes
    ) -> None:
        """See HiCache.store."""
        if state_at is None or state_pending:
            self.poison(live=request)
            self._cache.store(request, computed=computed, state_at=state_at, state_pending=state_pending, **options)
            return
        self.poison(live=None)
        self._cache.store(request, computed=computed, state_at=state_at, **options)
        if options.get("donate"):
            return  # the slot is the snapshot, poison and all
        for index, name in self._poison:
            self._cache.l1.state[index][name][:, request.state_slot(index)] = 0  # the ring goes on, empty

    def release(self, request: Request) -> None:
        """See HiCache.release."""
        self.poison(live=None)
        self._cache.release(request)
        self.poison(live=None)


@pytest.fixture(params=["hicached", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """Address and token of an L3, and the folder with everything that it keeps."""
    if request.param == "file":
        yield f"file://{tmp_path}/store", "", tmp_path / "store"
        return
    daemon = Daemon(tmp_path, TENANTS, 64 * MIB)
    daemon.start()
    yield daemon.address, TENANTS[0].token, daemon.data_folder
    daemon.kill()


def open_cache(spec: CacheSpec, store: tuple[str, str, Path], *, slots: int = 6, pages: int = 64) -> HiCache:
    address, token, _ = store
    return HiCache.open(
        spec,
        l1_pages=pages,
        l1_state_slots=slots,
        l2_bytes=8 * MIB,
        l3=address,
        l3_capacity_bytes=64 * MIB,
        token=token,
        prefetch=PREFETCH,
        snapshot_policy=SnapshotPolicy(state_interval_tokens=16),
    )


def test_no_transient_byte_is_in_l2_or_l3_after_speculative_decode_with_poison_in_every_slot(
    model: TinyHybrid, store: tuple[str, str, Path], prompts: list[list[int]]
) -> None:
    names = transient_names(model.spec())
    assert names == [f"ring_{name}" for name in ("d", "k", "g", "rawv", "rawk", "beta", "conv", "count")]
    with open_cache(model.spec(), store) as cache:
        connected = getattr(cache.l3, "wait_ready", lambda timeout_s: True)
        assert connected(timeout_s=20)
        poisoned = PoisonedL1(cache)
        engine = TinyEngine(model, poisoned, chunk_tokens=64)  # type: ignore[arg-type]
        for prompt in [*prompts, *prompts]:
            serve_with_drafts(engine, prompt)
        assert cache.flush(timeout_s=60)
        assert poisoned.restored_rings > 0
        in_l1 = Counter[str]()
        for fields in cache.l1.state.values():
            for name, field in fields.items():
                in_l1 += occurrences(field.numpy().tobytes(), [name] if name in names else [])
        assert min(in_l1[name] for name in names) >= 6, "the poison is in every slot of L1"
        assert cache.l2 is not None
        assert occurrences(cache.l2.buffer, names) == {}
        states = cache.l2.view(cache.spec.group_index("gdn"))
        sample = next(bytes(state.numpy().tobytes()) for state in states if state.any())
    assert occurrences_in_files(store[2], names) == {}
    assert any(sample in path.read_bytes() for path in store[2].rglob("*") if path.is_file()), "states are found there"


def serve_with_drafts(engine: TinyEngine, prompt: list[int]) -> None:
    reference = reference_generate(engine.model, prompt, 24)
    drafts = ScriptedDrafts(reference.tokens, 0.3, engine.model.config.vocab, seed=len(prompt))
    generated = engine.generate(prompt, 24, drafts=drafts, copy_restored_bytes=True)
    assert isinstance(generated, Generated), f"no room: {generated}"
    assert not isinstance(generated, Busy)
    assert generated.tokens == reference.tokens
    assert generated.restored is not None
    assert restored_differences(engine.spec, generated.restored, reference) == []


def with_persistent(spec: CacheSpec, names: Sequence[str]) -> CacheSpec:
    """The same, but that somebody forgot to say of these fields that they are transient."""
    groups = tuple(
        dataclasses.replace(
            group,
            fields=tuple(
                dataclasses.replace(field, transient=field.transient and field.name not in names)
                for field in group.fields
            ),
        )
        if isinstance(group, StateGroup)
        else group
        for group in spec.groups
    )
    return dataclasses.replace(spec, groups=groups)


@pytest.mark.parametrize("wrong", [f"ring_{name}" for name in ("d", "k", "g", "rawv", "rawk", "beta", "conv", "count")])
def test_the_search_finds_a_field_that_is_persistent_by_mistake(model: TinyHybrid, wrong: str, tmp_path: Path) -> None:
    """The positive control: the same poison, the same search, and a spec with one wrong field."""
    found = poison_found_below(
        with_persistent(model.spec(), [wrong]), model.spec(), ("file://" + str(tmp_path / "s"), "", tmp_path / "s")
    )
    assert {place: set(names) for place, names in found.items()} == {"l2": {wrong}, "l3": {wrong}}


def test_the_search_finds_every_wrong_field_in_the_store_of_hicached(model: TinyHybrid, daemon: Daemon) -> None:
    names = transient_names(model.spec())
    store = daemon.address, TENANTS[0].token, daemon.data_folder
    found = poison_found_below(with_persistent(model.spec(), names), model.spec(), store)
    assert {place: set(found[place]) for place in found} == {"l2": set(names), "l3": set(names)}


def poison_found_below(spec: CacheSpec, right: CacheSpec, store: tuple[str, str, Path]) -> Mapping[str, Counter[str]]:
    """One snapshot of a slot with poison in all fields that ``right`` calls transient; what is found of it below L1."""
    names = transient_names(right)
    with open_cache(spec, store, slots=2, pages=2) as cache:
        assert getattr(cache.l3, "wait_ready", lambda timeout_s: True)(timeout_s=20)
        request = cache.match(list(range(spec.page_tokens + 1)))
        assert cache.load(request) is not None
        assert cache.extend(request, tokens=spec.page_tokens)
        for index, fields in cache.l1.state.items():
            for name in names:
                fields[name][:, request.state_slot(index)] = filled(fields[name], name)
        cache.store(request, computed=spec.page_tokens, state_at=spec.page_tokens)
        assert cache.wait_stored(request, timeout_s=20).tokens == spec.page_tokens
        cache.release(request)
        assert cache.l2 is not None
        in_l2 = occurrences(cache.l2.buffer, names)
    return {"l2": in_l2, "l3": occurrences_in_files(store[2], names)}


def test_br_142_a_snapshot_that_would_not_be_of_a_committed_boundary_is_refused_and_the_request_goes_on(
    model: TinyHybrid, store: tuple[str, str, Path], prompts: list[list[int]]
) -> None:
    page, prompt = model.config.page_tokens, prompts[0]
    reference = reference_generate(model, prompt, 40)
    sequence = [*prompt, *reference.tokens]
    with open_cache(model.spec(), store) as cache:
        engine = TinyEngine(model, cache)
        request = cache.match(prompt)
        assert cache.load(request) is not None
        assert cache.extend(request, tokens=12 * page)
        view = engine.view(request)
        boundary = len(prompt) // page * page
        model.advance(view, prompt[:boundary], 0)
        cache.append(request, reference.tokens)

        def refused(computed: int, state_at: int, state_pending: int) -> None:
            with pytest.raises(StateNotCommitted, match=f"state_(at|pending) = {state_at}|{state_pending}"):
                cache.store(request, computed=computed, state_at=state_at, state_pending=state_pending)
            assert cache.flush(timeout_s=0), "nothing is on its way"
            assert not {"snapshot.ok", "backup.ok"} & cache.stats.objects.keys(), "and nothing was published"

        model.draft(view, sequence[boundary : boundary + 4], boundary)
        refused(boundary, boundary, model.pending(view))  # drafts that nobody has settled
        model.keep(view, 2)
        refused(boundary, boundary, model.pending(view))  # settled, and still in the ring
        model.fold(view)
        refused(boundary + 2, boundary + 2, 0)  # no boundary
        refused(boundary + 2, boundary, 0)  # the slot has gone on: it holds the state after two tokens more
        refused(boundary, boundary + page, 0)  # a boundary that nothing was computed for
        model.advance(view, sequence[boundary + 2 : boundary + page], boundary + 2)
        cache.store(request, computed=boundary + page, state_at=boundary + page)
        assert cache.stats.objects["snapshot.ok"] == 1
        logits = model.advance(view, sequence[boundary + page : len(prompt) + 20], boundary + page)
        assert int(logits.argmax()) == reference.tokens[20]
        assert cache.wait_stored(request, timeout_s=30).tokens == boundary + page
        cache.release(request)
        restored = engine.generate(sequence[: len(prompt) + 20], 4, copy_restored_bytes=True)
        assert isinstance(restored, Generated)
        assert restored.by_source["l1"] == boundary + page
        assert restored.tokens == reference.tokens[20:24]
