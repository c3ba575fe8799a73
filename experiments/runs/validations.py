"""What a GPU validated: ``reports/gpu/validations.csv``, a line for each function or family of kernels.

CI has no GPU. A line says how many cases and values were compared with the reference, how many differ, and when, at which
commit, on which device and with which versions; a new validation takes its place. What has changed in the code since is said,
and fails nothing.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.harness.revision import changed_files, commit, versions
from experiments.harness.rows import ROOT, write_text

FILE, TESTS = "reports/gpu/validations.csv", "tests/gpu/validate_kernels.py"
#: The part of the inputs and repetitions that fits into `SECONDS` on an H200; the program itself takes all of them.
FRACTION = "0.1"
#: How long a refresh takes at most, and the part of it that is left for processes to end.
SECONDS, GRACE = 480.0, 30.0
#: Public functions of `fast` that are compositions of others, or torch operations: they launch no kernel of their own.
COMPOSED = {"arrange_sparse_metadata", "matmul", "matmul_error_bound", "sparsegpt"}
#: Functions of this folder run once a layer, mostly torch operations; their kernels are compared by `tests/gpu/validate.py`.
CALIBRATION = "fast.calibration."
#: What has kernels besides the public functions: the first word of the families that test it.
OTHERS = {"jax", "saturation"}
#: Whose changes are told of.
FOLDERS = ("reference", "fast")


@dataclass(frozen=True)
class Validation:
    """One line. cases: calls compared; compared, different: their values; failed: tests that found a difference or an error."""

    name: str
    cases: int
    compared: int
    different: int
    failed: int
    date: str
    commit: str
    device: str
    versions: str

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.cases > 0 and self.compared > 0 and not self.different and not self.failed


COLUMNS = tuple(field.name for field in fields(Validation))
COUNTS = COLUMNS[1:5]


def read(root: Path = ROOT) -> dict[str, Validation]:
    """The lines by name; none where there is no table."""
    if not (root / FILE).exists():
        return {}
    with (root / FILE).open(newline="", encoding="utf-8") as file:
        lines = [{**one, **{name: int(one[name]) for name in COUNTS}} for one in csv.DictReader(file)]
    return {one["name"]: Validation(**one) for one in lines}


def record(found: Iterable[Validation], root: Path = ROOT) -> Path:
    """Put lines into the table, in the place of those of the same names."""
    lines = read(root) | {one.name: one for one in found}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(lines[name]) for name in sorted(lines))
    write_text(root / FILE, text.getvalue())
    return root / FILE


def validation(name: str, cases: int, compared: int, different: int, failed: int) -> Validation:
    """A line of here and now."""
    import torch

    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    words = versions("cpu" if gpu == "cpu" else "cuda")
    return Validation(name, cases, compared, different, failed, date, commit(), gpu, words)


def functions() -> list[str]:
    """What has kernels, and so a line."""
    import fast

    names = {name for name in fast.__all__ if not getattr(fast, name).__module__.startswith(CALIBRATION)}
    return sorted(OTHERS.union(names) - COMPOSED)


def problems(root: Path = ROOT) -> dict[str, str]:
    """What was never validated, and what differed when it was, by name."""
    found, lines = {}, read(root)
    for name in sorted({*functions(), *lines}):
        one = lines.get(name)
        if one is None:
            found[name] = "never validated on a GPU"
        elif not one.passed:
            differ = f"{one.different} of {one.compared} values differ, {one.failed} tests failed"
            found[name] = differ if one.cases else "no kernel was called when it was validated"
    return found


def changes(root: Path = ROOT) -> list[str]:
    """A line of information for each commit at which something was validated."""
    words = []
    for name, count in Counter(one.commit for one in read(root).values()).items():
        files = changed_files(name, FOLDERS, root)
        since = (
            "not known here" if files is None else f"{files} files under {', '.join(FOLDERS)} changed since"
        )
        words.append(f"{count} validated at {name or 'an unknown commit'}: {since}")
    return words


def refresh(seconds: float = SECONDS, root: Path = ROOT, names: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Validate everything, or these functions, on this GPU and write the lines; returns the path, and what time or no test
    reached. ValueError for a name that is no function with kernels."""
    if unknown := sorted({*names} - {*functions()}):
        raise ValueError(f"{unknown[0]!r} is no function with kernels; these are: {', '.join(functions())}")
    commit()  # of the code that is tested, whatever happens to the tree meanwhile
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tests.json"
        command = [sys.executable, str(root / TESTS), "--fraction", FRACTION, "--json", str(out)]
        command += ["--seconds", str(max(seconds - GRACE, 1.0))]
        command += ["--functions", ",".join(names)] if names else []
        # The program's own words are no result of the ledger's: they go where progress goes.
        subprocess.run(command, cwd=root, stdout=2, check=False)
        if not out.exists():
            raise OSError(f"{TESTS} ended without results; its errors are above")
        tests = json.loads(out.read_text(encoding="utf-8"))["tests"]
    late = sorted({entry_of(test["name"]) for test in tests if test["late"]})
    found: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        found.setdefault(entry_of(test["name"]), []).append(test)
    asked = set(names or [*functions(), *found])
    path = record([total(name, some) for name, some in found.items() if name in asked - {*late}], root)
    return path, sorted(asked.intersection(late) | (asked - set(found)))


#: What names a result of `tests/gpu/validate.py`: a subject, and which share of how many it is of where it is one.
RESULT = re.compile(r"(\w+)(?:\.(\d+)-of-(\d+))?")
#: Keys of a result; those of one run, which shares have in common, come last.
KEYS = ("checks", "wrong", "left out", "chosen by", "ended", "date", "commit", "device", "versions")
#: Results of a subject by (share, of how many).
Shares = dict[tuple[int, int], Mapping[str, Any]]


def add(folder: Path, root: Path = ROOT) -> tuple[list[str], dict[str, str]]:
    """Lines of what ``tests/gpu/validate.py --out folder`` compared, in place of earlier ones: cases are checks, each of which
    compares tensors. The names that were recorded, and of others why not (`obstacle`). ValueError where the folder has no
    results, or something else."""
    found, left = [], {}
    for name, shares in results_of(folder).items():
        if why := obstacle(shares):
            left[name] = why
            continue
        checks, wrong = (sum(count) for count in zip(*map(counts_of, shares.values()), strict=True))
        last = max(shares.values(), key=lambda one: str(one["date"]))
        about = (str(last[key]) for key in KEYS[-4:])
        found.append(Validation(f"checks of {name}", checks, checks, wrong, wrong, *about))
    record(found, root)
    return [one.name for one in found], left


def results_of(folder: Path) -> dict[str, Shares]:
    """The results that a folder holds, by subject; ValueError where it holds none, or a file that is none."""
    found: dict[str, Shares] = {}
    for path in sorted(folder.glob("*.json")):
        named, content = RESULT.fullmatch(path.stem), content_of(path)
        if named is None or not {*KEYS} <= {*content}:
            raise ValueError(
                f"{path} is no result of tests/gpu/validate.py as it writes them now; give a folder of its own"
            )
        share = (int(named[2] or 0), int(named[3] or 1))
        found.setdefault(named[1], {})[share] = content
    if not found:
        raise ValueError(f"{folder} has no results; write some with tests/gpu/validate.py --out {folder}")
    return found


def content_of(path: Path) -> Mapping[str, Any]:
    """The mapping that a file holds; nothing where it holds something else, or was not written to its end."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, Mapping) else {}


def counts_of(one: Mapping[str, Any]) -> tuple[int, int]:
    """How many checks a result has, and how many lines of what is wrong."""
    return int(one["checks"]), len(one["wrong"])


def obstacle(shares: Shares) -> str:
    """Why results are no validation of a subject: shares that are missing or of several runs, a process that did not end,
    checks that time did not reach or that nobody asked for, or no GPU; nothing where they are one."""
    each, (_, count) = [*shares.values()], max(shares, key=lambda share: share[1])
    late, dead = sum(len(one["left out"]) for one in each), sum(not one["ended"] for one in each)
    runs = {tuple(str(one[key]) for key in KEYS[-3:]) for one in each}
    if {of for _, of in shares} != {count} or len(runs) > 1:
        return "results of several runs; write each into a folder of its own"
    if {*shares} != {(at, count) for at in range(count)} or late or dead:
        missing = sorted({str(module) for one in each for module in one.get("missing", ())})
        why = f", not installed: {', '.join(missing)}" if missing else ""
        return f"{len(each) - dead} of {count} shares ended, {late} checks not reached{why}"
    if chosen := sorted({str(one["chosen by"]) for one in each} - {""}):
        return f"some of its checks alone, chosen by {', '.join(chosen)}"
    if each[0]["device"] == "cpu":
        return "compared on a CPU"
    return "" if sum(one["checks"] for one in each) else "no checks"


def entry_of(test: str) -> str:
    """The line that a test belongs to, by its name: ``family/function``."""
    family, _, function = test.rpartition("/")
    first = family.partition(" ")[0]
    return first if first in OTHERS else function


def total(name: str, tests: Iterable[Mapping[str, Any]]) -> Validation:
    """One line of several tests. Calls that `fast` gave to the reference compare it with itself, and count as no case."""
    ran = [test for test in tests if test["status"] != "skipped"]
    failed = sum(test["status"] != "ok" or bool(test["different"]) for test in ran)
    cases = sum(test["cases"] - test["handed_on"] for test in ran)
    return validation(
        name, cases, *(sum(test[key] for test in ran) for key in ("count", "different")), failed
    )
