"""What a tier refuses, reports and forgets, without an engine: a hicached in this process, and rows of plain memory."""

from __future__ import annotations

import dataclasses
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.connectors.row_store import RowSettings
from hicache.errors import ConfigError
from tests.connectors.test_checkpoint import write_safetensors
from tests.connectors.test_vllm_identity import Spec
from tests.connectors.test_vllm_identity import kv_cache_config as cache_config_of
from tests.connectors.test_vllm_identity import vllm_config as engine_config_of
from tests.daemon.rig import DaemonThread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn of themselves while they are imported
    import numpy as np
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

    from hicache.connectors import vllm_tier
    from hicache.connectors.vllm_tier import METRICS, HiCacheTier

DOCS = Path(__file__).parents[3] / "docs" / "vllm_tier.md"
ROWS, ROW_BYTES, STRIDE = 8, 6000, 8192
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(ROWS)]
REQUEST = ReqContext("r")
StartThread = Callable[..., DaemonThread]


def offloading_spec(*, events: bool = False) -> Any:
    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l0",))
    config = SimpleNamespace(
        worker_kv_bytes_per_block=ROW_BYTES // 2,
        cache=SimpleNamespace(blocks_per_chunk=2, tokens_per_hash=16),
        parallel=SimpleNamespace(world_size=1),
        groups=(group,),
        canonical_layout=False,
    )
    return SimpleNamespace(
        config=config,
        replicated_layout=False,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
    )


class Rig:
    """A tier over rows of its own, in the place where vLLM would make it."""

    def __init__(self, folder: Path, address: str | None, *, events: bool = False, **settings: Any) -> None:
        vllm_config, kv_cache_config = engine_config_of(), cache_config_of(Spec())  # the tier finds them up the stack
        vllm_config.speculative_config = vllm_config.lora_config = None
        vllm_config.use_v2_model_runner = False
        vllm_config.load_config = SimpleNamespace(load_format="auto", download_dir=None)
        vllm_config.model_config.model = str(folder)
        vllm_config.cache_config.prefix_caching_hash_algo = settings.pop("hash_algorithm", "sha256_cbor")
        vllm_config.lora_config = settings.pop("lora_config", None)
        assert kv_cache_config is not None
        self.rows = np.zeros((ROWS, STRIDE), np.uint8)
        patient = {"lookup_timeout_s": 20, "load_timeout_s": 20, "store_timeout_s": 20}
        self.tier = HiCacheTier(
            offloading_spec(events=events), memoryview(self.rows), "HiCacheTier", l3=address, **patient | settings
        )
        self._numbers = 0

    def _job(self, keys: list[bytes], rows: list[int], *, is_promotion: bool) -> TransferJob:
        self._numbers += 1
        return TransferJob(self._numbers, keys, np.array(rows), is_promotion, REQUEST)

    def store(self, keys: list[bytes], rows: list[int]) -> JobResult:
        self.tier.submit_store(self._job(keys, rows, is_promotion=False))
        return self.wait()

    def load(self, keys: list[bytes], rows: list[int]) -> JobResult:
        self.tier.submit_load(self._job(keys, rows, is_promotion=True))
        return self.wait()

    def wait(self) -> JobResult:
        ended: list[JobResult] = []
        until(lambda: ended.extend(self.tier.get_finished_jobs()) or ended)
        [result] = ended
        return result

    def lookup(self, key: bytes, request: str = "r") -> LookupResult:
        context = ReqContext(request)
        answers = [self.tier.lookup(key, context)]
        self.tier.on_schedule_end(ScheduleEndContext([], []))
        until(lambda: answers.append(self.tier.lookup(key, context)) or answers[-1] is not LookupResult.RETRY)
        return answers[-1]


def until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(20_000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came to be")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", {"w": b"1" * 100})
    return tmp_path


@pytest.fixture
def rigs(weights: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(daemon: DaemonThread, **settings: Any) -> Rig:
        made.append(Rig(weights, f"unix://{daemon.config.socket}", **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.tier.shutdown()


def test_a_row_comes_back_to_another_tier_of_the_same_model(
    start_thread: StartThread, rigs: Callable[..., Rig]
) -> None:
    daemon = start_thread()
    mine, other, stranger = rigs(daemon), rigs(daemon), rigs(daemon, weights_revision="other")
    mine.rows[1], mine.rows[2] = 7, 9
    assert mine.store(KEYS[:2], [1, 2]).success
    assert [other.lookup(key) for key in KEYS[:3]] == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    loaded = other.load(KEYS[:2], [5, 6])
    assert (loaded.success, loaded.transfer_bytes) == (True, 2 * ROW_BYTES)
    assert (other.rows[5, :ROW_BYTES] == 7).all()
    assert (other.rows[6, :ROW_BYTES] == 9).all()
    assert not other.rows[5, ROW_BYTES:].any()
    assert stranger.lookup(KEYS[0]) is LookupResult.MISS
    assert make_offload_key(KEYS[0][:-4], 1) not in KEYS
    assert other.lookup(make_offload_key(KEYS[0][:-4], 1)) is LookupResult.MISS


def test_what_came_of_a_load_is_kept_and_what_did_not_is_not_asked_for_again(
    start_thread: StartThread, rigs: Callable[..., Rig]
) -> None:
    rig = rigs(start_thread())
    rig.store(KEYS[:1], [0])
    assert rig.lookup(KEYS[0]) is LookupResult.HIT
    result = rig.load(KEYS[:2], [3, 4])
    assert (result.success, result.successful_keys) == (False, KEYS[:1])
    assert rig.load(KEYS[1:3], [3, 4]).successful_keys is None
    rig.tier.on_request_finished(REQUEST)
    assert rig.lookup(KEYS[1]) is LookupResult.MISS


def test_after_a_reset_nothing_from_before_is_found(start_thread: StartThread, rigs: Callable[..., Rig]) -> None:
    daemon = start_thread()
    rig, other = rigs(daemon), rigs(daemon)
    rig.store(KEYS[:1], [0])
    assert rig.lookup(KEYS[0], "before") is LookupResult.HIT
    rig.tier.drain_jobs()
    assert rig.lookup(KEYS[0], "after") is LookupResult.MISS
    rig.store(KEYS[1:2], [0])
    assert rig.lookup(KEYS[1], "mine") is LookupResult.HIT
    assert other.lookup(KEYS[1]) is LookupResult.MISS
    assert other.lookup(KEYS[0]) is LookupResult.HIT


def test_stored_chunks_are_told_where_they_are_wanted(start_thread: StartThread, rigs: Callable[..., Rig]) -> None:
    daemon = start_thread()
    silent = rigs(daemon, enable_kv_events=True)
    rig = rigs(daemon, events=True, enable_kv_events=True, locality="REMOTE")
    silent.store(KEYS[:1], [0])
    rig.store(KEYS[:2], [0, 1])
    rig.load(KEYS[:2], [0, 1])
    assert list(silent.tier.take_events()) == []
    [event] = rig.tier.take_events()
    assert (event.keys, event.removed, event.locality.value) == (KEYS[:2], False, "REMOTE")
    assert list(rig.tier.take_events()) == []


def test_counts_are_reported_once_and_under_defined_names(start_thread: StartThread, rigs: Callable[..., Rig]) -> None:
    rig = rigs(start_thread())
    assert rig.tier.get_stats() is None
    rig.store(KEYS[:2], [0, 1])
    rig.lookup(KEYS[5])
    rig.load(KEYS[:1], [0])
    stats = rig.tier.get_stats()
    assert stats is not None
    lookups, loads, stores = METRICS
    assert stats.data["data"] == {lookups: {("miss",): 1}, loads: {("ok",): 1}, stores: {("ok",): 2}}
    assert rig.tier.get_stats() is None
    assert set(HiCacheTier.build_metric_definitions({})) == set(METRICS)
    assert all(f"`{name}`" in DOCS.read_text() for name in METRICS)


def test_a_tier_lets_go_of_the_memory_that_vllm_unmaps(start_thread: StartThread, weights: Path) -> None:
    rig = Rig(weights, f"unix://{start_thread().config.socket}")
    rig.store(KEYS[:1], [0])
    view = rig.tier._memory.buffer
    rig.tier.shutdown()
    with pytest.raises(ValueError, match="released"):
        view[:1]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"load_timeout": 1}, r"secondary_tiers\.load_timeout = 1: expected one of .*load_timeout_s"),
    ({"locality": "NEAR"}, "LOCAL, REMOTE"),
    ({"weights": "deep"}, "sampled, full"),
    ({"load_timeout_s": 0}, "load_timeout_s = 0: expected seconds above 0"),
    ({"token_file": "/nowhere/token"}, r"/nowhere/token"),
    ({"hash_algorithm": "sha256"}, "--prefix-caching-hash-algo sha256_cbor"),
    ({"lora_config": SimpleNamespace()}, "adapters_never_change = true"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_settings_that_could_go_wrong_are_refused_with_the_fix(
    weights: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Rig(weights, "unix:///nowhere/s.sock", **settings)


@pytest.mark.parametrize("address", [None, "", "lmdb:///x", "/run/s.sock"])
def test_an_address_without_a_daemon_is_refused(weights: Path, address: str | None) -> None:
    with pytest.raises(ConfigError, match=r"secondary_tiers\.l3"):
        Rig(weights, address)


def test_a_token_that_hicached_does_not_know_stops_start_up(
    start_thread: StartThread, rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants"
    tenants.write_text("alice alice-token-0123456789\n")
    tenants.chmod(0o600)
    token = tmp_path / "token"
    token.write_text("alice-token-0123456789\n")
    daemon = start_thread(tenants_file=str(tenants))
    assert rigs(daemon, token_file=str(token)).store(KEYS[:1], [0]).success
    with pytest.raises(ConfigError, match="BAD_TOKEN"):
        rigs(daemon)


def test_a_hicached_that_is_away_is_no_reason_not_to_start(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(weights, "unix:///nowhere/s.sock")
    assert rig.lookup(KEYS[0]) is LookupResult.MISS
    assert not rig.store(KEYS[:1], [0]).success
    rig.tier.shutdown()
    assert "does not answer" in caplog.text


def test_adapters_are_allowed_where_the_operator_says_that_they_never_change(
    start_thread: StartThread, rigs: Callable[..., Rig]
) -> None:
    lora = engine_config_of().lora_config
    assert rigs(start_thread(), lora_config=lora, adapters_never_change=True).store(KEYS[:1], [0]).success


def test_a_tier_that_cannot_see_the_engine_is_refused(weights: Path) -> None:
    rows = np.zeros((ROWS, STRIDE), np.uint8)
    with pytest.raises(ConfigError, match="HiCacheConnector"):
        HiCacheTier(offloading_spec(), memoryview(rows), "HiCacheTier", l3="unix:///nowhere/s.sock")


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCS.read_text(), re.MULTILINE))
    defaults = {each.name: f"`{each.default}`" for each in dataclasses.fields(RowSettings)}
    assert set(rows) - {"HiCacheTier"} == {*vllm_tier._SETTINGS, *defaults, "backpressure"}
    assert {name: rows[name] for name in defaults} == defaults
