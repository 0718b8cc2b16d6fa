"""Generates the gRPC stubs of `hicache/wire/` from its proto, or checks that those on disk are fresh."""

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = Path("hicache/wire/hicached.proto")
STUBS = tuple(
    PROTO.with_name(PROTO.stem + suffix) for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
)


def generate(target: Path) -> None:
    """Writes the stubs below `target`, under the paths of `STUBS`; raises `CalledProcessError` on a bad proto."""
    plugins = Path(sysconfig.get_path("scripts"))
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT}"),
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        *(f"--python_out={target}", f"--grpc_python_out={target}"),
        *(f"--mypy_out=quiet:{target}", f"--mypy_grpc_out=quiet:{target}"),
        # A path from the root, so that the stubs import each other as `hicache.wire`.
        str(PROTO),
    ]
    subprocess.run(command, cwd=ROOT, check=True)


def stale_stubs() -> list[Path]:
    """The stubs on disk that differ from what the proto generates, or are missing."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return [stub for stub in STUBS if _read(ROOT / stub) != _read(Path(folder) / stub)]


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a stub is not fresh")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = stale_stubs()
    for stub in stale:
        print(f"{stub} is not what {PROTO} generates: run `make stubs` and commit the result", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
