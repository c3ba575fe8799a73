"""What a GPU validated: ``reports/gpu/validations.csv``, a line for each function or family of kernels.

CI has no GPU. A line says how many cases and values were compared with the reference, how many differ, and when, at which
commit, on which device and with which versions; a new validation takes its place. What has changed in the code since is said,
and fails nothing.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
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


def refresh(seconds: float = SECONDS, root: Path = ROOT) -> tuple[Path, list[str]]:
    """Validate everything on this GPU and write the lines; returns the path, and what time or no test reached."""
    commit()  # of the code that is tested, whatever happens to the tree meanwhile
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tests.json"
        command = [sys.executable, str(root / TESTS), "--fraction", FRACTION, "--json", str(out)]
        command += ["--seconds", str(max(seconds - GRACE, 1.0))]
        # The program's own words are no result of the ledger's: they go where progress goes.
        subprocess.run(command, cwd=root, stdout=2, check=False)
        if not out.exists():
            raise OSError(f"{TESTS} ended without results; its errors are above")
        tests = json.loads(out.read_text(encoding="utf-8"))["tests"]
    late = sorted({entry_of(test["name"]) for test in tests if test["late"]})
    found: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        found.setdefault(entry_of(test["name"]), []).append(test)
    path = record([total(name, some) for name, some in found.items() if name not in late], root)
    return path, sorted({*late, *(set(functions()) - set(found))})


def add(folder: Path, root: Path = ROOT) -> tuple[list[str], dict[str, str]]:
    """Lines of what ``tests/gpu/validate.py --out folder`` compared, in place of earlier ones: cases are checks, each of which
    compares tensors. The names that were recorded, and of others why not. ValueError where the folder has no such results."""
    shares: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for path in sorted(folder.glob("*.json")):
        name, _, share = path.stem.partition(".")
        count = int(share.rpartition("-")[2]) if share else 1
        shares.setdefault(name, []).append((count, json.loads(path.read_text(encoding="utf-8"))))
    if not shares:
        raise ValueError(f"{folder} has no results; write some with tests/gpu/validate.py --out {folder}")
    found, left = [], {}
    for name, each in shares.items():
        late = sum(len(one["left out"]) for _, one in each)
        if len(each) < each[0][0] or late:
            left[name] = f"{len(each)} of {each[0][0]} shares, {late} checks not reached"
            continue
        checks, wrong = sum(one["checks"] for _, one in each), sum(len(one["wrong"]) for _, one in each)
        _, last = each[-1]
        about = (str(last[key]) for key in ("date", "commit", "device", "versions"))
        found.append(Validation(f"checks of {name}", checks, checks, wrong, wrong, *about))
    record(found, root)
    return [one.name for one in found], left


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
