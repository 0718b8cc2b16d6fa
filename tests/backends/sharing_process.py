"""One of several processes on a shared folder: ``python -m tests.backends.sharing_process URL CAPACITY``.

Does what it is told, a line at a time, and answers each with a line. ``churn`` puts until it is killed.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path

from hicache.backends.file_shared import SharedFileBackend
from hicache.backends.open import open_backend
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put


class Sharer:
    """The process, seen from the test."""

    def __init__(self, url: str, capacity_bytes: int) -> None:
        command = [sys.executable, "-m", "tests.backends.sharing_process", url, str(capacity_bytes)]
        self.process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.hear() == "open"

    def say(self, *words: object) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        """Its next answer."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        """Both."""
        self.say(*words)
        return self.hear()

    def end(self, *, is_killed: bool = False) -> None:
        """Let it close the store, or not."""
        if is_killed:
            self.process.kill()
        self.process.communicate()


def obey(backend: SharedFileBackend, words: list[str]) -> str:
    """The answer to one line: outcomes, or numbers."""
    numbers = [int(word) for word in words[1:]]
    match words[0]:
        case "put":
            number, size_bytes = numbers
            return put(backend, (key(number), payload(number, size_bytes)))[0].name
        case "get":
            number, size_bytes = numbers
            outcome, content = get(backend, key(number), size_bytes)
            is_torn = outcome is Outcome.OK and content != payload(number, size_bytes)
            return "TORN" if is_torn else outcome.name
        case "race":
            first, size_bytes, batch = numbers
            outcomes = put(backend, *[(key(n), payload(n, size_bytes)) for n in range(first, first + batch)])
            return " ".join(outcome.name for outcome in outcomes)
        case "find":
            return backend.find([key(numbers[0])])[0].name
        case "delete":
            return backend.delete([key(numbers[0])])[0].name
        case "keep_up":
            backend.keep_up()
            return "done"
    raise ValueError(f"cannot {words[0]}")


def main() -> None:
    """Obey until the input ends."""
    backend = open_backend(sys.argv[1], capacity_bytes=int(sys.argv[2]))
    assert isinstance(backend, SharedFileBackend)
    print("open", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "churn":
            for number in count(int(words[1])):
                put(backend, (key(number), payload(number, int(words[2]))))
                print("put", number, flush=True)
        print(obey(backend, words), flush=True)
    backend.close()


if __name__ == "__main__":
    main()
