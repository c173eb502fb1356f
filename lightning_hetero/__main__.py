"""`python -m lightning_hetero` is the command `lightning-hetero`."""

from .cli import main

if __name__ == "__main__":
    main()
