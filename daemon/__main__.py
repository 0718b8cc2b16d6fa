"""`hicached`, and `python -m hicache.daemon`: from the first line on, signals wait until somebody can answer them."""

from hicache.daemon.early_signals import hold_signals


def main() -> None:
    """Runs the command. Importing it takes half a second, in which a signal must not end the process."""
    hold_signals()

    from hicache.daemon.cli import main as command

    command(prog_name="hicached")


if __name__ == "__main__":
    main()
