"""`python -m hicache.cli`."""

from hicache.cli import main

main()
