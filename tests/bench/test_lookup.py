"""bench.lookup with few objects."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from bench import lookup
from bench.lookup_daemon import CountBench, CountRow, counts_up_to, growth, why_not
from bench.lookup_directory import SPECS, measure_match
from bench.lookup_keys import measure_hashing
from hicache.keys import KEY_HASHES

ROW = CountRow(
    10_000,
    lookup_us=1.0,
    get_us=10.0,
    put_us=20.0,
    lookup_p99_ms=3.0,
    null_call_us=400.0,
    heap_bytes_per_object=300.0,
)


def test_counts_go_up_by_powers_of_ten():
    assert counts_up_to(1000) == [1000]
    assert counts_up_to(10**5) == [10**4, 10**5]
    assert counts_up_to(3 * 10**5) == [10**4, 10**5, 3 * 10**5]


def test_growth_is_what_a_key_costs_last_to_first():
    rows = [ROW, replace(ROW, lookup_us=9.0), replace(ROW, objects=10**6, lookup_us=1.3, get_us=5.0)]
    assert growth(rows) == {"lookup_us": 1.3, "get_us": 0.5, "put_us": 1.0}
    assert growth([]) == {}


def test_too_many_objects_for_the_machine_are_named_and_left_out(tmp_path, monkeypatch):
    assert why_not(1000, tmp_path, backend="lmdb") is None
    assert "disk" in why_not(10**12, tmp_path, backend="file")
    monkeypatch.setattr(lookup, "why_not", lambda objects, folder, backend: f"{objects} are too many")
    results = lookup.Results()
    lookup.measure_daemon(results, tmp_path, backend="lmdb", counts=counts_up_to(10**12), repetitions=1)
    assert results.objects == []
    assert len(results.skipped) == len(counts_up_to(10**12))


def test_hashing_is_measured_for_every_hash_and_source():
    rows = measure_hashing(tokens=1024, repetitions=1)
    assert [(row.key_hash, row.source) for row in rows] == [
        (key_hash, source) for key_hash in KEY_HASHES for source in ("int64", "list")
    ]
    assert all(row.ms > 0 and row.tokens == 1024 for row in rows)


def test_the_directory_matches_the_whole_prompt():
    rows = measure_match(400, prompt_pages=100, repetitions=2)
    assert {(row.groups, row.resident_in) for row in rows} == {
        (groups, place) for groups in SPECS for place in ("L1", "L2", "half L1, half L2")
    }
    assert {row.resident_pages for row in rows} == {400}
    assert all(row.open_us > 0 and row.five_lookups_us > 0 and row.of_limit > 0 for row in rows)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lookup")
    patch = pytest.MonkeyPatch()
    patch.setattr(lookup, "RESIDENT_PAGES_QUICK", (2_000,))
    patch.setattr(lookup, "INDEXED_QUICK", (2_000, 20_000))
    patch.setattr(lookup, "PAGES_QUICK", 256)
    arguments = ["--quick", "--objects-max", "3000", "--folder", str(folder), "--json", str(folder / "out.json")]
    result = CliRunner().invoke(lookup.main, arguments)
    patch.undo()
    assert result.exit_code == 0, result.output
    return json.loads((folder / "out.json").read_text()), result.output


def test_the_command_tells_everything_as_json(document):
    fields, _ = document
    assert set(fields) == {
        "hashing",
        "objects",
        "whole",
        "restart",
        "directory",
        "eviction",
        "skipped",
        "growth",
        "index",
        "index_growth",
        "machine",
    }
    [row] = fields["objects"]
    assert row["objects"] == 3000
    assert all(row[name] > 0 for name in ("lookup_us", "get_us", "put_us", "null_call_us"))
    assert [row["ended_by"] for row in fields["restart"]] == ["SIGTERM", "SIGKILL"]
    assert all(row["objects"] >= 3000 and row["ready_s"] > 0 for row in fields["restart"])
    assert [row["operation"] for row in fields["whole"]] == [
        "nothing",
        "put of another tenant",
        "list namespaces",
        "verify",
        "put into the full store",
        "erase of that tenant",
    ]
    assert all(row["lookup_ms_max"] > 0 for row in fields["whole"][:1])
    assert fields["skipped"] == []
    assert [row["objects"] for row in fields["index"]] == [2_000, 20_000]
    assert all(value > 0 for row in fields["index"] for value in row.values())
    assert {"lookup_us", "victim_us"} <= set(fields["index_growth"])


def test_the_command_prints_tables_for_people(document):
    _, output = document
    for title in (
        "Block keys",
        "hicached by resident objects",
        "The whole store",
        "in this process",
        "Restart",
        "Directory.open",
        "Eviction",
    ):
        assert title in output


def test_growing_counts_share_one_daemon(tmp_path):
    bench = CountBench(tmp_path / "daemon", backend="file", counts=(300, 600), repetitions=2)
    try:
        assert [bench.measure(count).objects for count in (300, 600)] == [300, 600]
    finally:
        bench.close()
