"""L1 -> L2 -> L3 -> a fresh engine -> back, bit for bit, in SGLang's own tree and controller."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.client.hicached import HicachedProcess, token_of
from tests.engines.sglang.rig import Device, Engine, assert_equal, extra_config, gdn, mha, mla, server, swa, tokens

MODELS: dict[str, Callable[[], Device]] = {"mha": mha, "mla": mla, "gdn": gdn, "swa": swa}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
HAVE = {  # which host layouts SGLang builds for which model
    "mha": LAYOUTS,
    "mla": ("layer_first", "page_first", "page_first_direct"),
    "gdn": ("page_first", "page_first_direct"),
    "swa": ("layer_first", "page_first", "page_first_direct"),
}


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize(
    ("model", "layout"), [(model, layout) for model, layouts in HAVE.items() for layout in layouts]
)
def test_what_one_engine_computed_another_restores_bit_for_bit(
    hicached: HicachedProcess, model: str, layout: str, core: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=f"{model}-{layout}-{core}")
    with server(config, layout=layout) as server_args:
        first = Engine(server_args, MODELS[model](), core=core)
        first.connect()
        computed = first.compute(tokens(16))
        first.settle()
        second = Engine(server_args, MODELS[model](), core=core)
        second.connect()
        slots = second.host_slots()
        assert second.prefetch(tokens(16)) == 16 * 8
        assert_equal(second.load(tokens(16)), computed)
        assert second.prefetch(tokens(16), salt="another tenant") == 0
        second.cache.reset()
        assert second.host_slots() == slots
        first.close()
        second.close()
