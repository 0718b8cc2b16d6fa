"""What an operator may write into kv_connector_extra_config, and what is said of anything else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from hicache.connectors.vllm_settings import VllmSettings
from hicache.errors import ConfigError


def test_defaults_are_those_of_the_policies() -> None:
    settings = VllmSettings.of({"l2_bytes": 1 << 20})
    assert settings.l3 is None
    assert not settings.tenant_salt_required
    assert settings.prefetch.mode == "timeout"
    assert settings.prefetch.threshold_tokens == 256


def test_prefetch_settings_reach_the_policy() -> None:
    named = {"mode": "wait_complete", "base_s": 2, "per_ki_token_s": 0.5, "hard_cap_s": 9.0, "threshold_tokens": 0}
    policy = VllmSettings.of({"l2_bytes": 1, **{f"prefetch_{name}": value for name, value in named.items()}}).prefetch
    assert {name: getattr(policy, name) for name in named} == named


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        VllmSettings.of({"l2_bytes": 1, "l2_size": 2})
    assert "['l2_size']" in str(refused.value)
    for field in dataclasses.fields(VllmSettings):
        assert field.name in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l2_bytes", 0),
        ("l2_bytes", "64GiB"),
        ("l2_bytes", True),
        ("l2_state_share", 1.5),
        ("l3", 7),
        ("prefetch_mode", "eager"),
        ("prefetch_base_s", -1),
        ("prefetch_threshold_tokens", 1.5),
        ("write_policy", "sometimes"),
        ("eviction", "oldest"),
        ("read_policy", "sometimes"),
        ("tenant_salt_required", "yes"),
        ("weights_revision", 3),
        ("weights", "none"),
        ("ranks", "here"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name.removeprefix("prefetch_")) as refused:
        VllmSettings.of({"l2_bytes": 1, name: value})
    assert repr(value) in str(refused.value)


def test_l2_must_be_sized() -> None:
    with pytest.raises(ConfigError, match="l2_bytes"):
        VllmSettings.of({"l3": "unix:///run/hicached.sock"})


def test_a_token_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        VllmSettings.of({"l2_bytes": 1, "ranks": "tcp://host:1", "ranks_token": ""})
    assert "ranks.token" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        VllmSettings(l2_bytes=1, token=b"secret")  # type: ignore[arg-type]
    assert "text" in str(refused.value)


def test_a_token_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    settings = VllmSettings.of({"l2_bytes": 1, "token_file": str(path)})
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        settings.secret  # noqa: B018
    path.write_text("secret\n")
    assert settings.secret == "secret"
    assert VllmSettings(l2_bytes=1, token="t").secret == "t"
    with pytest.raises(ConfigError, match="not both"):
        VllmSettings.of({"l2_bytes": 1, "token": "t", "token_file": str(path)})


def test_ranks_meet_where_the_operator_says() -> None:
    assert VllmSettings(l2_bytes=1).ranks_at("unix:///tmp/a.sock").address == "unix:///tmp/a.sock"
    elsewhere = VllmSettings(l2_bytes=1, ranks="tcp://head:7001", ranks_token="t").ranks_at("unix:///tmp/a.sock")
    assert (elsewhere.address, elsewhere.token) == ("tcp://head:7001", "t")
