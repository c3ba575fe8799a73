"""Tidy rows: the one form in which experiments hand over what they measured.

A row is one number with everything that tells it from other numbers, and where it comes from: when it was measured, at which
commit, on which device, with which versions of libraries and by which kernel. It never changes again: what is measured anew is
a new row in its place. Rows live in two places:

* the *journal*, a CSV file in the cache of this clone, which grows as an experiment goes and is what an interrupted run
  resumes from; its name holds the commit and the versions of torch and numpy, so others start anew;
* the *published* CSV under ``reports/data/`` (``.csv.gz`` where an experiment's record says so), which plots and pages read.

Both are replaced atomically, so a run that is killed leaves a whole file. A result that is missing stays missing: nothing here
fills a gap. A mean over seeds has a 95% interval (`interval`).
"""

from __future__ import annotations

import csv
import gzip
import importlib.metadata
import io
import math
import os
import re
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[2]
#: How the names of files end that are being written: where a run was killed, the next one deletes them.
PARTIAL = ".partial"

#: How the status of what was not reached begins.
NOT_RUN = "status: not run"

#: How a corpus is called in the name of a table: source, version, first digits of its hash.
CORPUS = re.compile(r"(.+)-([^-]+)-[0-9a-f]{8}")

Key = tuple[str, str, str, str, str, str, int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number.

    `table` is ``kind/scale/data`` (for instance ``quality/quick/sympy-1.14.0-1a2b3c4d``): rows of different data never share
    a table. `setting` and `method` place the number inside it, `metric` and `unit` say what it is, `published` is the
    number of the paper beside it (None where there is none). `kernel` names family and variant of what computed, where it is
    known; `date` is in UTC (ISO 8601), `commit` has eight digits and ends in ``+dirty`` where the tree had uncommitted changes;
    `versions` names libraries, and the processor of a CPU. What is not known is empty.
    """

    experiment: str
    table: str
    setting: str
    method: str
    metric: str
    value: float
    unit: str
    published: float | None = None
    device: str
    seed: int
    kernel: str = ""
    date: str = ""
    commit: str = ""
    versions: str = ""

    @property
    def key(self) -> Key:
        """What tells one row from another: everything but the numbers and their origin."""
        return self.experiment, self.table, self.setting, self.method, self.metric, self.device, self.seed

    @property
    def line(self) -> tuple[str, str, str, str]:
        """What is measured at once: table, setting, method, device."""
        return self.table, self.setting, self.method, self.device

    @property
    def place(self) -> tuple[str, str, str, str, str]:
        """What a complete run replaces as a whole: experiment, kind and scale of the table, source of its corpus, device."""
        kind, scale, data = table_parts(self.table)
        return self.experiment, kind, scale, corpus_source(data), self.device


def table_parts(table: str) -> tuple[str, str, str]:
    """Kind, scale and data of a table name."""
    parts = table.split("/")
    if len(parts) != 3:
        raise ValueError(f"a table is named kind/scale/data, got {table!r}; see rows.table_name")
    return parts[0], parts[1], parts[2]


def corpus_source(data: str) -> str:
    """The source of the corpus of a table, such as sympy in ``sympy-1.14.0-7bc7958f``; nothing where its data is no corpus."""
    found = CORPUS.fullmatch(data)
    return found.group(1) if found else ""


COLUMNS = tuple(field.name for field in fields(Row))


def table_name(kind: str, scale: str, data: str) -> str:
    """``kind/scale/data``; ValueError where a part holds a slash."""
    if any("/" in part for part in (kind, scale, data)):
        raise ValueError(f"parts of a table name hold no slash, got {kind!r}, {scale!r}, {data!r}")
    return f"{kind}/{scale}/{data}"


def library_versions() -> str:
    """Versions of the libraries that compute, as part of a name: other versions may give other numbers."""
    return "-".join(name + importlib.metadata.version(name) for name in ("torch", "numpy"))


def read(path: Path) -> list[Row]:
    """Rows of a CSV file, none where it does not exist; ValueError where its columns are not those of a row.

    A name that ends in ``.gz`` is of a compressed file.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path.name} is cut short or no file of rows ({error}); delete it and run again"
        ) from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(
            f"{path.name} has columns {reader.fieldnames}, rows have {list(COLUMNS)}; delete it and run again"
        )
    return [_parse(record) for record in reader]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Replace a CSV file atomically: readers see the old file or the new one, never a part."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _text(value) for name, value in asdict(row).items()} for row in rows)
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a temporary file in the same folder, then a rename. The same text is the same bytes, those
    of a compressed file too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp's files are private, reports are not
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


#: Seconds between two publications of a journal's rows.
EVERY = 5.0


class Journal:
    """Rows of one experiment as they are measured; without a path, in memory only.

    Methods may be called from several threads; two processes must not share a path.
    """

    def __init__(
        self,
        path: Path | None = None,
        known: Iterable[Row] = (),
        publish: Callable[[Sequence[Row]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """known: rows from elsewhere that need not be measured again. publish: gets all rows when new ones come, at most every
        EVERY seconds by the clock."""
        self.path, self.publish, self.clock = path, publish, clock
        self._published = -math.inf
        self._rows = {row.key: row for row in [*known, *(read(path) if path else ())]}
        self._lock = threading.Lock()

    @property
    def rows(self) -> list[Row]:
        """All finished rows."""
        return list(self._rows.values())

    def finished(self, table: str, setting: str, method: str, seed: int | None = None) -> bool:
        """Whether a method's rows are there (those of a seed). They are added together, so one stands for all."""
        with self._lock:
            return any(
                (row.table, row.setting, row.method) == (table, setting, method) and seed in (None, row.seed)
                for row in self._rows.values()
            )

    def add(self, rows: Iterable[Row]) -> None:
        """Take new rows in, all or none; a row with the key of an older one replaces it."""
        with self._lock:
            self._rows.update({row.key: row for row in rows})
            self._write()

    def drop(self, rows: Iterable[Row]) -> None:
        """Forget rows, which are then measured again, however soon that breaks off."""
        with self._lock:
            for row in rows:
                self._rows.pop(row.key, None)
            self._write()

    def _write(self) -> None:
        if self.path:
            write(self.path, list(self._rows.values()))
        if self.publish and self.clock() - self._published >= EVERY:
            self.publish(list(self._rows.values()))
            self._published = self.clock()


def publish(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Put a complete run into a published CSV; returns what the file now holds.

    Tables of the same kind, scale, device and source of the corpus are replaced as a whole (a scheme that no longer exists
    leaves with them, and so does another version of the corpus); other scales, devices and corpora stay as they were.
    """
    replaced = {row.place for row in rows}
    others = [row for row in read(path) if row.place not in replaced]
    merged = sorted([*others, *rows], key=lambda row: (row.experiment, row.table, row.device))
    write(path, merged)
    return merged


def _text(value: object) -> object:
    if value is None:
        return ""
    # 9 digits tell any two float32 apart and keep the file free of float64 noise.
    return f"{value:.9g}" if isinstance(value, float) else value


def _parse(record: dict[str, str]) -> Row:
    published = record["published"]
    return Row(
        **{
            name: record[name]
            for name in (
                *("experiment", "table", "setting", "method", "metric", "unit", "device"),
                *("kernel", "date", "commit", "versions"),
            )
        },
        value=float(record["value"]) if record["value"] else math.nan,
        published=float(published) if published else None,
        seed=int(record["seed"]),
    )


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half the width of its 95% interval (Student's t)."""

    mean: float
    half: float


def interval(values: Sequence[float]) -> Interval:
    """The mean and its interval; ValueError for less than two values."""
    from ao_lab.intervals import half_interval

    if len(values) < 2:
        raise ValueError(f"an interval takes at least 2 seeds, got {len(values)}")
    half = half_interval(stdev(values) / math.sqrt(len(values)), len(values))
    return Interval(fmean(values), math.nan if half is None else half)  # None where values are not finite
