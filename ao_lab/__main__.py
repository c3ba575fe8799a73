"""`python -m ao_lab`: the command line from an uninstalled clone."""

from ao_lab.cli.app import entry

if __name__ == "__main__":
    entry()
