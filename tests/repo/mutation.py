"""The mutation check: break one rule at a time in a copy of the tree and see the tests object.

    python -m tests.repo.mutation              all rules of `mutants.py`, or `make mutation`
    python -m tests.repo.mutation NAME ...     those with such words in their names or files
    python -m tests.repo.mutation --list
    python -m tests.repo.mutation --workers 1 --json before.json
    python -m tests.repo.mutation --workers 1 --json after.json --compare before.json

Each rule is one textual replacement. Its tests run first in an untouched copy (they must pass there), then in the broken one.
The exit status is 1 if a mutation survived, did not apply (its text must occur exactly once), or broke no more than the clock;
with --compare if one that an earlier run caught is not caught any more: a test was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.repo.mutants import MUTATIONS, Mutation
from tests.support.runs.time_budget import ALL_CASES

ROOT = Path(__file__).resolve().parents[2]
#: What is imported, and so has to lie in the copy.
PACKAGES = ("reference", "ao_lab", "fast", "experiments", "tests")
#: What tests only read.
READ = ("reports", "docs", "README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt")
LIMIT = 300  # seconds for one run of pytest
WORKERS = 2
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+)$", re.MULTILINE)
#: pytest's exit status: only failing tests count as failed, not missing ones.
OUTCOMES = {0: "passed", 1: "failed"}
CAUGHT = "caught"
VERDICTS = {
    "failed": CAUGHT,
    "passed": "SURVIVED",
    "clock": "RAN OUT OF TIME",
    "broken": "TESTS DID NOT RUN",
}
WHERE = """
from importlib.util import find_spec
from pathlib import Path
for name in {names}:
    print(Path(find_spec(name).origin).resolve())
"""


@dataclass(frozen=True)
class Run:
    """How tests ended ("passed", "failed", "clock" or "broken"), after how many seconds, and which failed first, why."""

    outcome: str
    seconds: float
    failed: str = ""


@dataclass(frozen=True)
class Row:
    """What became of a mutation."""

    name: str
    file: str
    verdict: str
    seconds: float
    tests: str
    killed_by: str = ""


def copy_tree(target: Path) -> None:
    """What the tests import, and links to what they read."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    for name in READ:
        (target / name).symlink_to(ROOT / name)


def environment(folder: Path) -> dict[str, str]:
    """That of processes whose modules are those of a copy."""
    own = {
        "HYPOTHESIS_PROFILE": "ci",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(folder),
        "COLUMNS": "240",  # pytest says in one line why a test failed
        ALL_CASES: "1",  # a rule is not to depend on which cases run by day
    }
    return {**os.environ, **own}


def check_imports(folder: Path) -> None:
    """RuntimeError where tests in a copy would import another tree, for instance an installed one."""
    names = [f"{name}.conftest" if name == "tests" else name for name in PACKAGES]
    command = [sys.executable, "-c", WHERE.format(names=names)]
    found = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    places = found.stdout.split()
    elsewhere = [one for one in places if not Path(one).is_relative_to(folder.resolve())]
    if elsewhere or len(places) != len(names):
        raise RuntimeError(f"{folder}: {elsewhere or found.stderr} would be imported, not what is here")


def run_tests(folder: Path, tests: str) -> Run:
    """pytest in a copy, up to the first failure."""
    check_imports(folder)
    command = f'"{sys.executable}" -m pytest -x -q -p no:cacheprovider -p no:xdist {tests}'
    start = time.monotonic()
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment(folder), start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Run("clock", time.monotonic() - start)
    outcome, failed = OUTCOMES.get(process.returncode, "broken"), FAILED.search(output)
    return Run(outcome, time.monotonic() - start, failed[1] if failed and outcome == "failed" else "")


def mutate(folder: Path, mutation: Mutation) -> bool:
    """Replace the rule in a copy; False where its text does not occur exactly once."""
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return False
    path.write_text(text.replace(mutation.old, mutation.new))
    return True


def check(mutation: Mutation) -> Row:
    """One mutation in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_tree(folder)
        if not mutate(folder, mutation):
            return row_of(mutation, "DID NOT APPLY")
        run = run_tests(folder, mutation.arguments)
    return row_of(mutation, VERDICTS[run.outcome], run)


def row_of(mutation: Mutation, verdict: str, run: Run | None = None) -> Row:
    """A mutation, and what is said of it."""
    seconds, failed = (0.0, "") if run is None else (round(run.seconds, 1), run.failed)
    return Row(mutation.name, mutation.file, verdict, seconds, mutation.arguments, failed)


def sound(tests: str) -> tuple[str, Run]:
    """A selection of tests in an untouched copy: a mutation counts only where they pass without it."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_tree(Path(name))
        return tests, run_tests(Path(name), tests)


def unsound(chosen: Sequence[Mutation], workers: int) -> dict[str, Run]:
    """Selections that do not pass without any mutation, each said once."""
    bad = {}
    with ThreadPoolExecutor(workers) as pool:
        for tests, run in pool.map(sound, dict.fromkeys(m.arguments for m in chosen)):
            say(f"{run.outcome:18} {run.seconds:5.0f} s  without any mutation: {tests}")
            if run.outcome != "passed":
                bad[tests] = run
    return bad


def checked(chosen: Sequence[Mutation], workers: int) -> Iterator[Row]:
    """What became of each mutation, as it is known; those whose tests fail anyway are not tried."""
    bad = unsound(chosen, workers)
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda m: row_of(m, "UNSOUND") if m.arguments in bad else check(m), chosen)


def lost(before: Sequence[Mapping[str, object]], rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Mutations that were caught before and are not now, or are no more; names: all of today's table, whether chosen or not."""
    verdicts = {row.name: row.verdict for row in rows}
    gone = [str(row["name"]) for row in before if row["verdict"] == CAUGHT]
    return [
        f"{name}: {verdicts.get(name, 'NOT IN THE TABLE')}"
        for name in gone
        if (name in verdicts or name not in names) and verdicts.get(name) != CAUGHT
    ]


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Break one rule at a time and see the tests object.")
    parser.add_argument("names", nargs="*", help="words of the mutations' names or files; all by default")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--workers", type=int, default=WORKERS, help="how many run at once")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write a row for each mutation")
    parser.add_argument(
        "--compare", type=Path, metavar="BEFORE", help="rows of an earlier run: what is lost since"
    )
    return parser.parse_args(arguments)


def tried(chosen: Sequence[Mutation], workers: int, out: Path | None) -> list[Row]:
    """Rows of all, said and written to `out` as they are known: a run takes long."""
    rows: list[Row] = []
    for row in checked(chosen, workers):
        rows.append(row)
        say(f"{row.verdict:18} {row.seconds:5.0f} s  {row.file}: {row.name}")
        if out:
            out.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    say(f"{len(rows)} mutations, {sum(row.verdict != CAUGHT for row in rows)} problems")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the check and print its table."""
    options = parsed(arguments)
    words = options.names or [""]
    chosen = [m for m in MUTATIONS if any(word in f"{m.file} {m.name}" for word in words)]
    if options.list:
        for mutation in chosen:
            say(f"{mutation.file:48} {mutation.name:50} {mutation.arguments}")
        return 0
    before = json.loads(options.compare.read_text()) if options.compare else None
    rows = tried(chosen, options.workers, options.json)
    if before is None:
        return 1 if not rows or any(row.verdict != CAUGHT for row in rows) else 0
    missing = lost(before, rows, [m.name for m in MUTATIONS])
    say("\n".join(["caught before, and not now:", *missing]) if missing else "nothing was lost")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
