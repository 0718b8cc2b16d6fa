"""SGLang's own prefetch and write policies over hicached, and attaching to it again and again."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.client.hicached import HicachedProcess, token_of
from tests.client.small_daemon import SmallDaemon
from tests.client.support import open_descriptors, wait_until
from tests.engines.sglang.conftest import Start
from tests.engines.sglang.devices import PAGE_TOKENS, gdn, mha
from tests.engines.sglang.rig import assert_equal, extra_config, storage_threads, tokens

POLICIES = ("best_effort", "wait_complete", "timeout")

revisions = itertools.count()


@pytest.fixture
def revision() -> str:
    """Weights that no other test has."""
    return f"policies {next(revisions)}"


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_prefetch_policy_reads_what_every_write_policy_wrote(
    hicached: HicachedProcess, start: Start, revision: str, policy: str, write_policy: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(gdn(), config, policy=policy, write_policy=write_policy)
    first.connect()
    computed = first.compute(tokens(16))
    first.settle()
    assert first.stored(tokens(16)) == (16 if write_policy == "write_through" else 0)
    first.use_again(tokens(16))
    if write_policy == "write_back":
        first.evict_from_the_device(len(tokens(16)))
    first.settle()
    assert first.stored(tokens(16)) == 16
    second = start(gdn(), config, policy=policy, write_policy=write_policy)
    second.connect()
    slots = second.host_slots()
    loaded = second.prefetch(tokens(16), until_done=True)
    assert loaded == 16 * PAGE_TOKENS
    assert_equal(second.load(tokens(16)), computed)
    second.cache.reset()
    assert second.host_slots() == slots


@pytest.mark.parametrize("policy", POLICIES)
def test_br_034_a_store_that_hangs_holds_no_request_whatever_the_policy(
    daemon: SmallDaemon, start: Start, policy: str
) -> None:
    config = extra_config(daemon.address, deadline_s=0.3, prefetch_timeout_base=0.1, prefetch_timeout_per_ki_token=0.0)
    first = start(mha(), config)
    first.connect()
    first.compute(tokens(8))
    first.settle()
    second = start(mha(), config, policy=policy)
    second.connect()
    slots = second.host_slots()
    release = daemon.faults.hang(where="before_bytes", operation="get", times=100)
    assert second.prefetch(tokens(8)) == 0  # returns while the store still hangs
    release.set()
    second.idle()
    second.cache.reset()
    assert second.host_slots() == slots


def test_attaching_again_and_again_leaks_nothing(hicached: HicachedProcess, start: Start, revision: str) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    engine = start(mha(), config)
    engine.connect()
    computed = engine.compute(tokens(8))
    engine.settle()
    engine.cache.detach_storage_backend()
    wait_until(lambda: not storage_threads(), what="the end of the threads")
    before = open_descriptors()
    for policy in POLICIES:
        attached, text = engine.cache.attach_storage_backend("dynamic", json.dumps(config), "org/model", policy, None)
        assert attached, text
        engine.connect()
        engine.evict_everything()
        assert engine.prefetch(tokens(8), until_done=True) == 8 * PAGE_TOKENS
        assert_equal(engine.load(tokens(8)), computed)
        detached, text = engine.cache.detach_storage_backend()
        assert detached, text
        assert engine.cache.detach_storage_backend()[0], "again"
        wait_until(lambda: not storage_threads(), what="the end of the threads")
    wait_until(lambda: not open_descriptors() - before, what="the end of the descriptors")


def test_oe_26_a_store_that_is_attached_late_gets_names_of_whole_prompts(
    hicached: HicachedProcess, start: Start, revision: str
) -> None:
    """The tree is older than the store: pages without a name must not make a new beginning of those behind them."""
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    engine = start(mha(), config)
    engine.cache.detach_storage_backend()
    engine.compute(tokens(4))
    attached, text = engine.cache.attach_storage_backend(
        "dynamic", json.dumps(config), "org/model", "wait_complete", None
    )
    assert attached, text
    engine.connect()
    engine.extend(tokens(4), tokens(8))
    engine.use_again(tokens(8))
    engine.settle()
    computed = engine.on_device(tokens(8))
    assert engine.stored(tokens(8)[4 * PAGE_TOKENS :]) == 0, "the second half is no prompt"
    engine.evict_everything()
    assert engine.prefetch(tokens(8)) == 8 * PAGE_TOKENS
    assert_equal(engine.load(tokens(8)), computed)


def test_a_configuration_that_cannot_be_leaves_the_engine_ready_for_another(
    hicached: HicachedProcess, start: Start, revision: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    engine = start(mha(), config)
    engine.cache.detach_storage_backend()
    for wrong, named in (({"dead_line_s": 1}, "deadline_s"), ({"l3": "nowhere"}, "unix:///"), ({"l3": ""}, "l3")):
        attached, text = engine.cache.attach_storage_backend(
            "dynamic", json.dumps(config | wrong), "org/model", "timeout", None
        )
        assert not attached
        assert named in text
    attached, text = engine.cache.attach_storage_backend("dynamic", json.dumps(config), "org/model", "timeout", None)
    assert attached, text


def test_a_detached_store_answers_with_misses(hicached: HicachedProcess, start: Start, revision: str) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    engine = start(mha(), config)
    engine.connect()
    storage = engine.storage
    storage.close()
    storage.close()
    assert storage.batch_exists(["0" * 64]) == 0
    assert not storage.exists("0" * 64)
    assert not storage.clear()
    assert storage.get_stats() is not None
