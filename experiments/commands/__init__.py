"""Commands of the experiments for `ao-lab`, which finds `cli` by the entry points in pyproject.toml (`ao_lab.cli.plugins`)."""
