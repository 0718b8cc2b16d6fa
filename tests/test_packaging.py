"""What is installed: the wheel holds what git tracks, and importing the core loads neither torch nor grpc."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("backends", "kernels", "daemon")


def tracked_files() -> list[str]:
    """What a commit of the work tree as it is now would hold; links are listed as themselves."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of tracked files to compare with")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({name for name in listed if name and ((ROOT / name).exists() or (ROOT / name).is_symlink())})


def installed_name(tracked: str) -> str | None:
    """Where the wheel keeps a tracked file; None for one that is not installed."""
    folder = tracked.split("/", 1)[0]
    if folder == "hicache":
        return None if (ROOT / tracked).is_symlink() else tracked
    return f"hicache/{tracked}" if folder in LINKED else None


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files alone, so that no leftover of an earlier build can enter the wheel."""
    target = tmp_path_factory.mktemp("tree")
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def wheel_names(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", str(out), str(tree)], check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = out.glob("hicache-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_exactly_what_git_tracks(wheel_names: set[str]) -> None:
    package = {name for name in wheel_names if ".dist-info/" not in name}
    tracked = {installed for name in tracked_files() if (installed := installed_name(name)) is not None}
    assert package == tracked
    # A positive control: each of the linked folders did travel.
    assert {f"hicache/{folder}/__init__.py" for folder in LINKED} <= package


def test_the_wheel_installs_one_import_package(wheel_names: set[str]) -> None:
    assert {name.split("/", 1)[0] for name in wheel_names if ".dist-info/" not in name} == {"hicache"}


@pytest.mark.parametrize("folder", LINKED)
def test_the_links_are_relative_and_lead_to_the_folder_at_the_top(folder: str) -> None:
    assert (ROOT / "hicache" / folder).readlink() == Path("..") / folder


def test_every_dependency_is_pinned() -> None:
    def name(requirement: str) -> str:
        bare = requirement
        for end in "<>=!~;[ ":
            bare = bare.split(end, 1)[0]
        return bare.lower().replace("_", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {name(line) for line in [*project["dependencies"], *extras["engine"], *extras["mooncake"], *extras["dev"]]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if "==" not in line or "+" in line] == []
    assert needed <= {name(line) for line in lines}


def engine_pins(engine: str) -> dict[str, str]:
    lines = (ROOT / "tests" / "engines" / f"requirements-{engine}.txt").read_text().splitlines()
    return dict(canonical(line).split("==") for line in lines if not line.startswith("#"))


def canonical(requirement: str) -> str:
    return requirement.lower().replace("_", "-")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_environment_of_an_engine_has_what_hicache_needs_in_versions_that_it_takes(engine: str) -> None:
    pinned = engine_pins(engine)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in [*project["dependencies"], "torch>=2.11", "pytest>=9", "pytest-timeout"]]
    missing = [str(need) for need in needed if not need.specifier.contains(pinned.get(canonical(need.name), "0"))]
    assert missing == []
    assert [f"{name}=={version}" for name, version in pinned.items() if "+" in version] == []


def test_the_environments_of_the_engines_have_the_same_of_what_hicache_is_made_of() -> None:
    one, other = engine_pins("vllm"), engine_pins("sglang")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shared = {canonical(Requirement(line).name) for line in project["dependencies"]} - {"numpy"}  # numba bounds vLLM's
    assert {name: one[name] for name in shared | {"torch", "pytest"}} == {
        name: other[name] for name in shared | {"torch", "pytest"}
    }


def loaded_after_import(module: str, *, watched: frozenset[str], cwd: Path) -> set[str]:
    """Which of `watched` a fresh interpreter holds after importing `module`, away from the checkout."""
    code = f"import json, sys, {module}; print(json.dumps(sorted({set(watched)!r} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("hicache", frozenset({"torch", "triton", "grpc"})),
        ("hicache.keys", frozenset({"torch", "triton", "grpc"})),
        ("hicache.spec", frozenset({"torch", "triton", "grpc"})),
        ("hicache.directory", frozenset({"torch", "triton", "grpc"})),
        ("hicache.daemon.server", frozenset({"torch", "triton"})),
        ("hicache.admin.client", frozenset({"torch", "triton", "grpc", "aiohttp"})),
        ("hicache.cli", frozenset({"torch", "triton", "grpc"})),
    ],
)
def test_importing_a_module_loads_nothing_heavy(module: str, forbidden: frozenset[str], tmp_path: Path) -> None:
    assert loaded_after_import(module, watched=forbidden, cwd=tmp_path) == set()


def test_the_probe_for_loaded_modules_sees_what_is_loaded(tmp_path: Path) -> None:
    assert loaded_after_import("hicache.wire.hicached_pb2_grpc", watched=frozenset({"grpc"}), cwd=tmp_path) == {"grpc"}
