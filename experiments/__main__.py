"""`python -m experiments [TABLE ...] [--scale quick|full] [--device cpu|cuda] [--corpus NAME --corpus-path DIR]
[--model DIR] [--only NAME] [--seconds S]`: the minimal form of `ao-lab reproduce`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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
    parser.add_argument("--seconds", type=float, help="start nothing after so many, where an experiment can")
    parser.add_argument(
        "--model", action="append", default=[], help="a folder that ptq or calibration measures"
    )
    parser.add_argument("--task", action="append", default=[], help="with --model: of lm-evaluation-harness")
    parser.add_argument("--windows", type=int, help="with --model: of each text")
    parser.add_argument("--length", type=int, help="with --model: tokens of a window")
    parser.add_argument("--corpus", default="sympy", help="the text that models are trained on")
    parser.add_argument("--corpus-path", type=Path, help="the folder of that text, where it has one")
    arguments = parser.parse_args(argv)
    try:
        from experiments.runs.run import text_for
        from experiments.runs.settings import RealModels

        given = {"tasks": tuple(arguments.task), "windows": arguments.windows, "length": arguments.length}
        real = RealModels(models=tuple(arguments.model), **given) if arguments.model else None
        made = reproduce(
            arguments.tables,
            scale=arguments.scale,
            device=arguments.device,
            only=arguments.only,
            seconds=arguments.seconds,
            real=real,
            text=text_for(arguments.tables, arguments.corpus, arguments.corpus_path),
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{what}: {where}\n" for what, where in made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
