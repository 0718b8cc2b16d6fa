"""The back end of copies is the one that is fastest here, and never one that moves wrong bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from hicache.copies import PoolCopies
from hicache.errors import ConfigError
from hicache.kernels import direct
from hicache.moves import DIRECT, REFERENCE, Moves, by_speed, choose_moves, plain_moves
from hicache.pools import L1Pool, L2Pool
from tests.engine.specs import as_bytes, fill_with_noise, hybrid_spec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_measured_yet() -> Iterator[None]:
    by_speed.cache_clear()
    yield
    by_speed.cache_clear()


class Functions:
    """Those of ``direct``, but for one."""

    def __init__(self, name: str, seen: list[str], gather_pages: Callable[..., None]) -> None:
        def call(*arguments: Any, **slots: Any) -> None:
            seen.append(name)
            gather_pages(*arguments, **slots)

        self.gather_pages = call
        self.scatter_pages = direct.scatter_pages
        self.gather_states = direct.gather_states
        self.scatter_states = direct.scatter_states


def noting(name: str, seen: list[str], gather_pages: Callable[..., None]) -> Moves:
    return plain_moves(name, Functions(name, seen, gather_pages))


def test_the_fastest_is_chosen_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that one of the two makes run."""
    now_s = 0.0
    seen: list[str] = []

    def slowly(*arguments: Any, **slots: Any) -> None:
        nonlocal now_s
        now_s += 1.0
        direct.gather_pages(*arguments, **slots)

    monkeypatch.setattr("hicache.moves.time.perf_counter", lambda: now_s)
    slow, quick = noting("slow", seen, slowly), noting("quick", seen, direct.gather_pages)
    assert by_speed((slow, quick), run_bytes=4096, by_layer=False, device=CPU)[0] is quick
    seen.clear()
    assert by_speed((slow, quick), run_bytes=4096, by_layer=False, device=CPU)[0] is quick
    assert not seen
    assert by_speed((quick, slow), run_bytes=1 << 20, by_layer=True, device=CPU)[0] is quick
    assert {"slow", "quick"} == set(seen)


def raise_error(*arguments: Any, **slots: Any) -> None:
    raise OSError("libcudart.so.12: cannot open shared object file")


def move_nothing(*arguments: Any, **slots: Any) -> None:
    return


def move_to_the_next(pool: Any, pages: torch.Tensor, *, sources: list[int], targets: list[int]) -> None:
    """Every byte is copied, to a page that it does not belong to."""
    direct.gather_pages(pool, pages, sources=sources, targets=[*targets[1:], targets[0]])


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (raise_error, "cannot open shared object file"),
        (move_nothing, "it moved wrong bytes"),
        (move_to_the_next, "it moved wrong bytes"),
    ],
)
def test_br_050_a_back_end_that_does_not_work_here_is_left_out_and_named(
    copy: Callable[..., None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = noting("broken", [], copy)
    assert [*by_speed((REFERENCE, broken), run_bytes=4096, by_layer=False, device=CPU)] == [REFERENCE]
    assert "no copies through 'broken' on cpu: " in caplog.text
    assert message in caplog.text


def test_without_memory_for_a_sample_the_first_one_copies(caplog: pytest.LogCaptureFixture) -> None:
    """As on a device that the engine has filled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hicache.moves.torch.empty", partial(refuse, "CUDA out of memory"))
        assert [*by_speed((REFERENCE, DIRECT), run_bytes=4096, by_layer=False, device=CPU)] == [REFERENCE]
    assert "for lack of a measurement" in caplog.text


def refuse(why: str, *arguments: Any, **settings: Any) -> Any:
    raise RuntimeError(why)


def test_a_back_end_that_cannot_serve_a_pool_is_passed_over_by_auto_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unable = Moves("unable", partial(refuse, "no memory for staging"), partial(refuse, "no memory for staging"))
    spec = hybrid_spec()
    l1, l2 = L1Pool(spec, pages=6, state_slots=4), L2Pool(spec, (8, 8, 3))
    monkeypatch.setattr("hicache.copies.choose_moves", lambda *arguments, **settings: [unable, DIRECT, REFERENCE])
    assert PoolCopies(l1, l2).name == "direct"
    assert "no copies of group 2 through 'unable': RuntimeError('no memory for staging')" in caplog.text
    monkeypatch.setattr("hicache.copies.choose_moves", lambda *arguments, **settings: [unable])
    with pytest.raises(RuntimeError, match="no memory for staging"):
        PoolCopies(l1, l2)
    l2.close()


def test_a_named_back_end_is_taken_as_it_is() -> None:
    for moves in (REFERENCE, DIRECT):
        assert [*choose_moves(moves.name, run_bytes=1, by_layer=True, device=CPU)] == [moves]
    assert by_speed.cache_info().currsize == 0


def test_another_name_is_refused_with_those_that_there_are() -> None:
    spec = hybrid_spec()
    l1 = L1Pool(spec, pages=2, state_slots=2)
    with pytest.raises(ConfigError, match="copies = 'fast': expected one of auto, reference, direct"):
        PoolCopies(l1, None, setting="fast")


@pytest.mark.parametrize("setting", ["auto", "reference", "direct"])
def test_pages_and_states_come_back_by_every_back_end(setting: str) -> None:
    spec = hybrid_spec()
    l1, l2 = L1Pool(spec, pages=6, state_slots=4), L2Pool(spec, (8, 8, 3))
    copies = PoolCopies(l1, l2, setting=setting)
    assert setting in (copies.name, "auto")
    tensors = [*l1.paged.values(), *l1.state[2].values()]
    for seed, tensor in enumerate(tensors):
        fill_with_noise(tensor, seed)
    kept = {0: l1.paged[0][:, 3].clone(), 1: l1.paged[1][:, 3].clone(), 2: l1.state[2]["temporal"][:, 3].clone()}
    for group in range(3):
        copies.backup(group, [3], [2])
        copies.load(group, [2], [1])
    assert as_bytes(l1.paged[0][:, 1]) == as_bytes(kept[0])
    assert as_bytes(l1.paged[1][:, 1]) == as_bytes(kept[1])
    assert as_bytes(l1.state[2]["temporal"][:, 1]) == as_bytes(kept[2])
    assert not l1.state[2]["ring_d"][:, 1].any()
    l2.close()
