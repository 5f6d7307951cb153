"""``python -m omniloom``."""

from omniloom.cli import run

if __name__ == "__main__":
    run()
