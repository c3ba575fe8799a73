"""`python -m experiments [TABLE ...] [--scale quick|full] [--device cpu|cuda]`: the minimal form of `ao-lab reproduce`."""

from __future__ import annotations

import argparse
import sys

from experiments import EXPERIMENTS, reproduce


def main(argv: list[str] | None = None) -> int:
    """Run and list what was written; exit code 2 for input that makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument(
        "tables", nargs="*", help=f"any of {', '.join(EXPERIMENTS)}; without, all that always run"
    )
    parser.add_argument("--scale", choices=("quick", "full"), default="quick")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument(
        "--only", action="append", default=[], help="a configuration of decode; several times"
    )
    arguments = parser.parse_args(argv)
    try:
        made = reproduce(
            arguments.tables, scale=arguments.scale, device=arguments.device, only=arguments.only
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{what}: {where}\n" for what, where in made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
