"""`python -m kvgen` is the command `kvgen`."""

from kvgen.cli import main

if __name__ == "__main__":
    main()
