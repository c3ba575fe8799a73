"""All 2**32 float32 bit patterns through `encode` to e4m3fn and e5m2, both overflow policies, against ml_dtypes.

    python -m tests.repo.exhaustive_float32 [--workers N] [--jax] [--fresh]          (or: make exhaustive)

ml_dtypes rounds to nearest even and has no saturation, so every code that `encode` should write follows from its code by
two rules, each counted:

* NaN: ours is 7F for every NaN; ml_dtypes keeps the sign (e4m3fn) or writes 7E and FE (e5m2);
* overflow (`saturate` only): where ml_dtypes goes beyond the largest finite value, ours stays there.

What no rule predicts is `unexplained` and makes the run fail. Work goes in 256 chunks of 2**24 patterns in ascending order of
the pattern read as an unsigned integer. Finished chunks are kept in `.cache/`, under the commit, so that an interrupted run
resumes. The digest of a format is the SHA-256 of its 256 chunks' SHA-256 digests, in order.

Writes reports/data/exhaustive_float32.csv (tidy rows) and exhaustive_float32.sha256. Progress goes to stderr.
With --jax the codes of JAX under jit are compared too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from experiments.harness.revision import commit, state, versions
from experiments.harness.rows import Row, table_name, write, write_text
from reference.formats.encode import encode
from reference.formats.formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "reports" / "data"
EXPERIMENT = "exhaustive_float32"
CHUNK = 1 << 24
CHUNKS = (1 << 32) // CHUNK
NAMES = ("float8_e4m3fn", "float8_e5m2")
POLICIES = ("nonfinite", "saturate")
UNITS = {"patterns": "patterns", "seconds": "s"}

Chunk = dict[str, Any]


def check_chunk(job: tuple[str, int, bool]) -> Chunk:
    """Encode one chunk in both policies, predict each code from ml_dtypes, count and hash."""
    name, index, with_jax = job
    started = time.perf_counter()
    fmt = FORMATS[name]
    x = np.arange(index * CHUNK, (index + 1) * CHUNK, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        theirs = x.astype(getattr(ml_dtypes, name)).view(np.uint8)
    nan = np.isnan(x)
    if not np.isnan(fmt.values[theirs[nan]]).all():
        raise AssertionError(f"ml_dtypes makes a number of a NaN in chunk {index} of {name}")
    result: Chunk = {"name": name, "index": index}
    for policy, predicted in zip(POLICIES, (theirs, saturated(theirs, name)), strict=True):
        overflow = int(((predicted != theirs) & ~nan).sum())
        predicted = np.where(nan, np.uint8(fmt.nan_code or 0), predicted)
        ours = encode(x, name, overflow=policy)
        result[policy] = {
            "NaN": int((predicted[nan] != theirs[nan]).sum()),
            "overflow": overflow,
            "differences": int((ours != theirs).sum()),
            "unexplained": int((ours != predicted).sum()),
            "sha256": hashlib.sha256(ours).hexdigest(),
        }
        if with_jax:
            result[policy]["jax"] = int((jax_codes(x, name, policy) != ours).sum())
    return {**result, "seconds": time.perf_counter() - started}


def saturated(codes: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Infinity or NaN replaced by the largest finite code of its sign."""
    fmt = FORMATS[name]
    table = np.arange(256).astype(np.uint8)
    beyond = ~np.isfinite(fmt.values)
    table[beyond] = (table & fmt.sign_mask | fmt.max_code)[beyond]
    return table[codes]


def jax_codes(x: np.ndarray[Any, Any], name: str, policy: str) -> np.ndarray[Any, Any]:
    """Codes by JAX under jit; the patterns travel as integers, so that nothing can change them on the way."""
    import jax

    if (name, policy) not in _COMPILED:
        _COMPILED[name, policy] = jax.jit(
            lambda bits: encode(jax.lax.bitcast_convert_type(bits, "float32"), name, overflow=policy)
        )
    return np.asarray(_COMPILED[name, policy](x.view(np.uint32)))


_COMPILED: dict[tuple[str, str], Any] = {}


def read_journal(path: Path) -> dict[tuple[str, int], Chunk]:
    """Chunks that earlier runs finished; a last line that was cut off is ignored."""
    finished = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            chunk = json.loads(line)
        except json.JSONDecodeError:
            continue
        finished[chunk["name"], chunk["index"]] = chunk
    return finished


def run(workers: int, with_jax: bool, fresh: bool) -> list[Chunk]:
    """All chunks of all formats, finished ones from the journal, the others by worker processes."""
    journal = ROOT / ".cache" / "exhaustive_float32" / f"{state()}{'-jax' * with_jax}.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        journal.unlink(missing_ok=True)
    finished = read_journal(journal)
    jobs = [(name, i, with_jax) for name in NAMES for i in range(CHUNKS) if (name, i) not in finished]
    sys.stderr.write(f"{len(finished)} of {len(NAMES) * CHUNKS} chunks were finished before\n")
    with multiprocessing.get_context("spawn").Pool(workers) as pool, journal.open("a") as file:
        for chunk in progress(pool.imap_unordered(check_chunk, jobs), len(jobs)):
            finished[chunk["name"], chunk["index"]] = chunk
            # A fresh line: the journal may end in one that was cut off.
            file.write(f"\n{json.dumps(chunk)}")
            file.flush()
    return [finished[name, i] for name in NAMES for i in range(CHUNKS)]


def progress(chunks: Iterable[Chunk], total: int) -> Iterable[Chunk]:
    """Pass chunks on and say on stderr how far they are."""
    started = time.perf_counter()
    for done, chunk in enumerate(chunks, 1):
        yield chunk
        left = (time.perf_counter() - started) / done * (total - done)
        sys.stderr.write(f"\r{done}/{total} chunks, {left:4.0f} s left ")
    sys.stderr.write("\n")


def summarize(chunks: list[Chunk]) -> tuple[list[Row], list[str]]:
    """Rows of counts, and one line a digest."""
    rows, digests = [], []
    for name in NAMES:
        mine = [chunk for chunk in chunks if chunk["name"] == name]
        seconds = sum(chunk["seconds"] for chunk in mine)
        rows += [
            row(name, "all", "patterns", CHUNK * len(mine)),
            row(name, "all", "seconds", round(seconds, 1)),
        ]
        for policy in POLICIES:
            counts = [chunk[policy] for chunk in mine]
            metrics = [key for key in counts[0] if key != "sha256"]
            rows += [row(name, policy, key, sum(count[key] for count in counts)) for key in metrics]
            joined = b"".join(bytes.fromhex(count["sha256"]) for count in counts)
            digests.append(f"{hashlib.sha256(joined).hexdigest()}  {name} {policy}")
    return rows, digests


def row(name: str, policy: str, metric: str, value: float) -> Row:
    """One number of the run."""
    return Row(
        experiment=EXPERIMENT,
        table=table_name("float32", "full", f"ml_dtypes-{ml_dtypes.__version__}"),
        setting=policy,
        method=name,
        metric=metric,
        value=value,
        unit=UNITS.get(metric, "codes"),
        device=f"cpu {platform.machine()} x{os.cpu_count()}",
        seed=0,
        kernel="reference",
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=commit(),
        versions=versions(),
    )


def main() -> int:
    """Run, write both files, and fail where a code is unexplained or JAX differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--jax", action="store_true", help="compare JAX under jit as well")
    parser.add_argument("--fresh", action="store_true", help="forget the chunks of earlier runs")
    arguments = parser.parse_args()
    commit()  # of the code that the workers load now, whatever is edited while they work
    rows, digests = summarize(run(arguments.workers, arguments.jax, arguments.fresh))
    write(DATA / "exhaustive_float32.csv", rows)
    write_text(DATA / "exhaustive_float32.sha256", "\n".join(digests) + "\n")
    shown = [f"{r.method} {r.setting:9} {r.metric:11} {r.value:15,.0f} {r.unit}" for r in rows]
    sys.stdout.write("\n".join([*shown, *digests]) + "\n")
    return int(any(r.value for r in rows if r.metric in ("unexplained", "jax")))


if __name__ == "__main__":
    sys.exit(main())
