"""`python -m vmoer` is the command `vmoer`."""

from vmoer.cli import main

if __name__ == "__main__":
    main()
