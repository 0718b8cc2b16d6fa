"""`python -m hicache.daemon` is `hicached`."""

from hicache.daemon.cli import main

main(prog_name="hicached")
