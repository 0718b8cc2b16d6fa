"""What vLLM itself calls images, and what hicache makes of it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.connectors.vllm_identity import has_media_by_name
from hicache.connectors.vllm_settings import VllmSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn of themselves while they are imported
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.renderers.base import BaseRenderer

    from hicache.connectors.vllm import HiCacheConnector

IMAGE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def connector(*, trusted: bool = False, cache_gb: float = 4.0, has_prefix_caching: bool = True) -> Any:
    """As far as requests are identified by it."""
    made = object.__new__(HiCacheConnector)
    made._settings = VllmSettings(l2_bytes=1, media_ids_trusted=trusted)
    made._own_name = "this engine"
    made._adapters = None
    made._vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_caching),
    )
    return made


def request(*names: str) -> Any:
    features = [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(0, 4), mm_hash=name) for name in names]
    return SimpleNamespace(cache_salt=None, lora_request=None, mm_features=features)


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_oe_05_what_vllm_hashes_itself_is_known_as_content(algorithm: Any) -> None:
    name = MultiModalHasher.hash_kwargs(algorithm, image=IMAGE)
    assert not has_media_by_name(request(name))
    assert connector()._identity_of(request(name)).extras == {}
    assert connector()._identity_of(request()).extras == {}


def test_oe_05_what_a_client_has_named_is_this_engines_own_unless_it_is_trusted() -> None:
    assert connector()._identity_of(request("image-1")).extras == {"names_of": "this engine"}
    assert connector(trusted=True)._identity_of(request("image-1")).extras == {}


def test_oe_05_numbers_that_vllm_gives_are_this_engines_own_whoever_is_trusted() -> None:
    """vLLM still numbers them where it keeps nothing of them, and so does this test of its renderer."""
    renderer = object.__new__(_Renderer)
    renderer.model_config = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0))  # type: ignore[attr-defined]
    renderer.config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False))  # type: ignore[attr-defined]
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1}, items=lambda: ())
    named = renderer._process_mm_uuids({"image": [IMAGE]}, _Items(items), {}, "renderer0-mm-1")
    assert named == {"image": ["renderer0-mm-1-image-0"]}

    looks_like_content = "a1" * 32
    numbering = connector(trusted=True, cache_gb=0, has_prefix_caching=False)
    assert numbering._identity_of(request(looks_like_content)).extras == {"names_of": "this engine"}
    assert numbering._identity_of(request()).extras == {}


class _Renderer(BaseRenderer):  # type: ignore[misc, type-arg]
    def _validate_mm_uuids(self, *arguments: Any) -> None: ...

    async def render_messages_async(self, *arguments: Any) -> Any: ...

    def render_messages(self, *arguments: Any) -> Any: ...


class _Items(dict[str, Any]):
    def __init__(self, items: Any) -> None:
        super().__init__()
        self.get_all_counts = items.get_all_counts
