"""``python -m tests.simulation``: as many lives as one likes, and the seeds of those that went wrong."""

from __future__ import annotations

import time
import traceback
from contextlib import nullcontext
from hashlib import blake2b

import click

from tests.simulation import mutants
from tests.simulation.storm import WEATHERS
from tests.simulation.tally import Tally
from tests.simulation.world import World


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of the first life; the next one has the next.")
@click.option("--lives", default=100, show_default=True, help="How many.")
@click.option("--weather", type=click.Choice(sorted(set(WEATHERS))), default=None, help="Default: as the seed has it.")
@click.option("--statements", default=0.0, help="Switch between statements, too: at one of so many.")
@click.option(
    "--ranks/--one-rank", default=None, help="Engines have several, or one each. Default: as the seed has it."
)
@click.option("--mutant", default=None, help="With this fault of mutants.py in the code: what finds it goes wrong.")
def main(seed: int, lives: int, weather: str | None, statements: float, ranks: bool | None, mutant: str | None) -> None:
    """Simulated lives of a node. Exits with 1 when one of them went wrong."""
    tally, wrong = Tally(), []
    began_s = time.perf_counter()
    options = f" --weather {weather}" * bool(weather) + f" --statements {statements:g}" * bool(statements)
    options += "" if ranks is None else " --ranks" if ranks else " --one-rank"
    for number in range(seed, seed + lives):
        fault = nullcontext() if mutant is None else getattr(mutants, mutant)()
        try:
            with fault:
                tally.add(World(number, weather=weather or "", statements=statements, ranks=ranks).run())
        except Exception as error:
            wrong.append(number)
            traceback.print_exception(error)
            click.echo(f"again: python -m tests.simulation --seed {number} --lives 1{options}")
    for name, value in vars(tally).items():
        if name != "traces":
            click.echo(f"{name:20}{value:>12,}")
    click.echo(f"{'digest':20}{blake2b(''.join(tally.traces).encode(), digest_size=6).hexdigest():>12}")
    click.echo(f"{'seconds':20}{time.perf_counter() - began_s:>12,.1f}")
    if wrong:
        raise SystemExit(f"{len(wrong)} lives went wrong: seeds {', '.join(map(str, wrong))}")


main()
