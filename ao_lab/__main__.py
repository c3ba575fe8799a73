"""`python -m ao_lab`: the command line from an uninstalled clone."""

import sys

from ao_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
