"""Long runs: `python -m tests.security.fuzz [--seconds N] [--seed N] [TARGET ...]`; prints how often each target ran.

With atheris installed, `--coverage TARGET` has it look for inputs that reach new code.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from random import Random

import click

from tests.security.fuzz.live import attacked
from tests.security.fuzz.media import media
from tests.security.fuzz.mutation import mutated
from tests.security.fuzz.parsers import PARSERS, Target


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="For each target.")
@click.option("--seed", default=0, show_default=True, help="Of the changes.")
@click.option("--coverage", is_flag=True, help="Guided by atheris, one target.")
@click.argument("names", nargs=-1)
def main(seconds: float, seed: int, coverage: bool, names: tuple[str, ...]) -> None:
    """Run targets; all of them without a name."""
    with ExitStack() as stack:
        targets = [*PARSERS, *stack.enter_context(media()), *stack.enter_context(attacked()).targets()]
        known = {target.name: target for target in targets}
        if unknown := set(names) - set(known):
            raise click.UsageError(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
        chosen = [known[name] for name in names] or targets
        if coverage:
            _run_guided(chosen[0], seconds=seconds)
        for target in chosen:
            click.echo(f"{target.name}: {run_for(target, seconds=seconds, seed=seed)} executions")


def run_for(target: Target, *, seconds: float, seed: int) -> int:
    """How often it ran. What breaks a promise is raised, with the input on stderr."""
    random, count = Random(f"{target.name} {seed}"), 0
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        data = mutated(random, target.seeds)
        try:
            target.run(data)
        except BaseException:
            click.echo(f"{target.name} broke at execution {count} with {data!r}", err=True)
            raise
        count += 1
    return count


def _run_guided(target: Target, *, seconds: float) -> None:
    import atheris  # type: ignore[import-not-found]  # not in the development environment

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}"], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
