"""`hicached`, and `python -m hicache.daemon`: from the first line on, signals wait until somebody can answer them."""

from hicache.daemon.early_signals import hold_signals
from hicache.daemon.standard_files import open_standard_files


def main() -> None:
    """Runs the command. Importing it takes half a second, in which a signal must not end the process."""
    open_standard_files()
    hold_signals()

    from hicache.daemon.cli import main as command

    command(prog_name="hicached")


if __name__ == "__main__":
    main()
