"""The example unit lets engines in: a user of its own means that clients come through a group."""

from __future__ import annotations

import re
from pathlib import Path

from hicache.daemon.config import DaemonConfig

ROOT = Path(__file__).parents[2]


def test_clients_of_the_unit_connect_through_a_group_as_the_docs_say() -> None:
    unit = (ROOT / "systemd" / "hicached.service").read_text()
    docs = (ROOT / "docs" / "hicached.md").read_text().partition("\n## systemd\n")[2]
    assert "DynamicUser=yes\n" in unit
    assert DaemonConfig().socket_mode_bits & 0o070 == 0, "else no advice is needed"
    group = re.search(r"^Group=(\w+)$", unit, re.MULTILINE)
    assert group is not None
    for said in (f"groupadd --system {group[1]}", 'socket_mode = "0660"', "/run/credentials/hicached.service/tenants"):
        assert said in unit, said
        assert said in docs, said
    credential = re.search(r"^#(LoadCredential=tenants:\S+)$", unit, re.MULTILINE)
    assert credential is not None
    assert credential[1] in docs
