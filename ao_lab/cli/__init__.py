"""The command line `ao-lab`."""
