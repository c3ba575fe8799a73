"""The mutation check: break one rule at a time in a copy of the tree and see the tests object.

    python tests/repo/mutation.py            all rules, or `make mutation`
    python tests/repo/mutation.py NAME ...   some of them
    python tests/repo/mutation.py --list

Each rule is one textual replacement. Its tests run first in the untouched copy (they must pass there), then in the broken one.
The exit status is 1 if a mutation survived, did not apply (its text must occur exactly once), or broke no more than the clock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("reference", "ao_lab", "fast", "tests", "pyproject.toml")
LIMIT = 240  # seconds for one run of pytest
WORKERS = 2


@dataclass(frozen=True)
class Mutation:
    """One broken rule; `tests` are pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MXFP4 = "tests/reference/quantize/test_quantize.py -k mxfp4_equals"
INT8 = "tests/reference/quantize/test_quantize.py -k int8_asymmetric_equals"
ELEMENTS = "tests/reference/quantize/test_elements.py"
ROUNDING = "tests/reference/formats/test_rounding.py"
SCALES = "tests/reference/quantize/test_scales.py"
SOFTFLOAT = "tests/reference/arrays/test_softfloat.py -k integer_rules"
STATISTICS = "tests/reference/quantize/test_statistics.py"
BLOCKS = "tests/reference/quantize/test_blocks.py"
MX = "tests/reference/schemes/torchao/test_mx.py"
SPARSITY = "tests/reference/sparsity/test_"

MUTATIONS = [
    Mutation("ties to even go up", "formats/rounding.py", "- 1) + (floor & 1)) >> shift", "- 1) + 1) >> shift", ROUNDING),
    Mutation("to_odd forgets what was lost", "formats/rounding.py", "return floor | inexact", "return floor", ROUNDING),
    Mutation("up and down swapped", "formats/rounding.py", 'if mode == "down"', 'if mode == "up"', ROUNDING),
    Mutation("stochastic takes the low random bits", "formats/rounding.py", '"int32") >> 8)', '"int32"))', ROUNDING),
    Mutation("ties go up in the short rule", "formats/encode_bits.py",
             "((magnitude >> drop) & 1)) >> drop", "1) >> drop", MXFP4),
    Mutation("saturation one code late", "formats/encode_bits.py", "return ns.minimum(code, fmt.max_code)",
             "return ns.minimum(code, fmt.max_code + 1)", "tests/reference/quantize/test_quantize.py -k static_scales"),
    Mutation("integers lose their lowest value", "formats/encode_bits.py", "ns.minimum(ns.maximum(integer, low), high)",
             "ns.minimum(ns.maximum(integer, low + 1), high)", INT8),
    Mutation("rceil too large at an exact ratio", "quantize/power_scales.py", "fraction > target_fraction",
             "fraction >= target_fraction", SCALES),
    Mutation("ceil misses one ulp over a power of two", "quantize/power_scales.py", "fraction > 0", "fraction > 1", SCALES),
    Mutation("even rounds at the wrong bit", "quantize/power_scales.py", "22 - bits", "21 - bits", SCALES),
    Mutation("floor without the target's exponent", "quantize/power_scales.py", "exponent - target_exponent",
             "exponent - target_exponent + 1", SCALES),
    Mutation("scales have no floor", "quantize/scales.py",
             "return ns.maximum(bits, bits_of(floor_value(record.floor[1], dtype)))",
             "return bits", SCALES),
    Mutation("zero point by a reciprocal", "quantize/scales.py", "steps = unit.divide(span.low, scale)",
             "steps = unit.multiply(span.low, unit.reciprocal(scale))", ELEMENTS),
    Mutation("block scale by an outer reciprocal", "quantize/scales.py", "else wide.divide(bits, outer)",
             "else wide.multiply(bits, wide.reciprocal(outer))", ELEMENTS),
    Mutation("elements divided instead of multiplied", "quantize/elements.py",
             "return unit.multiply(x, _reciprocal(ns, unit, scale, outer, scheme))",
             "return unit.divide(x, scale if outer is None else unit.multiply(outer, scale))", ELEMENTS),
    Mutation("two reciprocals instead of one", "quantize/elements.py", "bits = unit.reciprocal(unit.multiply(outer, scale))",
             "bits = unit.divide(unit.reciprocal(outer), scale)", ELEMENTS),
    Mutation("smallest MX scale applied as 2^-126", "quantize/elements.py", "exponent = ns.maximum(scale >> 23, 0) - E8M0_BIAS",
             "exponent = ns.maximum(scale >> 23, 1) - E8M0_BIAS", MXFP4),
    Mutation("quotients without a sticky bit", "arrays/softfloat.py", "quotient | ns.where(remainder != 0, 1, 0)", "quotient",
             SOFTFLOAT),
    Mutation("sums without a sticky bit", "arrays/softfloat.py",
             "(wide >> shift) | ns.where((wide & ((1 << shift) - 1)) != 0, 1, 0)",
             "wide >> shift", SOFTFLOAT),
    Mutation("products round ties up", "arrays/softfloat.py", "(significand + (1 << (drop - 1)) - 1 + odd) >> drop",
             "(significand + (1 << (drop - 1))) >> drop", SOFTFLOAT),
    Mutation("short blocks filled with their first element", "quantize/blocks.py",
             "(slice(-1, None),)", "(slice(0, 1),)", BLOCKS),
    Mutation("blocks run along the last axis only", "quantize/blocks.py",
             "return ns.moveaxis(x, -1, self.axis).reshape(self.shape)",
             "return x.reshape(self.shape)", BLOCKS),
    Mutation("finite products overflow", "quantize/quantize.py",
             "return ns.where(overflow, (product & SIGN) | LARGEST, product)",
             "return product", "tests/reference/quantize/test_quantize.py -k 'rounded_product or finite_stays'"),
    Mutation("infinity hides a NaN", "quantize/statistics.py", "nan = largest > INFINITY", "nan = largest >= INFINITY",
             "tests/reference/schemes/torchao/test_integers.py tests/reference/quantize/test_statistics.py"),
    Mutation("means of subnormals round up", "quantize/statistics.py",
             "(values + ((values >> 1) & 1)) >> 1", "(values + 1) >> 1",
             STATISTICS),
    Mutation("the range may miss zero", "quantize/statistics.py",
             "ns.where(span.high < 0, 0, span.high)", "span.high", STATISTICS),
    Mutation("logarithms rounded as numbers are not", "arrays/log2.py", "spacing / (4 if toward_zero and",
             "spacing / (2 if toward_zero and",
             MX + " tests/reference/schemes/torchao/test_fp8.py"),
    Mutation("compress takes -0 for a weight", "sparsity/compress.py", "(bits != 0) & (bits != negative)", "bits != 0",
             SPARSITY + "compress.py"),
    Mutation("RIA without its square root", "sparsity/scores.py", "square_root(ns, norms) if exponent == 0.5 else norms",
             "norms", SPARSITY + "scores.py"),
    Mutation("a zero weight on an infinite norm", "sparsity/scores.py", "(score == 0) & ~is_nan(norms)", "score < 0",
             SPARSITY + "scores.py"),
    Mutation("an infinity counts as a NaN in a tile", "sparsity/transposable.py", "NAN_COUNT = 9", "NAN_COUNT = 1",
             SPARSITY + "transposable.py"),
    Mutation("rows of a tile added one by one", "sparsity/transposable.py",
             "plus(plus(rows[0], rows[1]), plus(rows[2], rows[3]))", "plus(plus(plus(rows[0], rows[1]), rows[2]), rows[3])",
             SPARSITY + "transposable.py"),
    Mutation("no update behind a block", "sparsity/sparsegpt.py", "errors @ upper[start:stop, stop:]", "0",
             SPARSITY + "sparsegpt.py"),
    Mutation("scores without the diagonal", "sparsity/sparsegpt.py",
             "np.abs(wide[:, j : j + group]) / diagonal[j : j + group]", "np.abs(wide[:, j : j + group])",
             SPARSITY + "sparsegpt.py"),
    Mutation("damping of the largest element", "sparsity/sparsegpt.py", "share * diagonal.mean()", "share * diagonal.max()",
             SPARSITY + "sparsegpt.py"),
    Mutation("an infinite square of a finite activation", "sparsity/activation.py", "ns.minimum(product, LARGEST)", "product",
             SPARSITY + "activation.py"),
    Mutation("SR-STE decays what is kept", "sparsity/sr_ste.py",
             "ns.where(mask, ns.bitcast(a, carrier), ns.bitcast(b, carrier))",
             "ns.where(mask, ns.bitcast(b, carrier), ns.bitcast(a, carrier))", SPARSITY + "sr_ste.py"),
    Mutation("group 0000 reaches the hardware", "sparsity/layouts.py", "ns.where(groups == 0, NOTHING_KEPT, groups), m, k // 4",
             "groups, m, k // 4", SPARSITY + "layouts.py"),
    Mutation("tiles of one width", "sparsity/layouts.py", "64 * n * (r // 16 % 4)", "128 * (r // 16 % 4)",
             SPARSITY + "layouts.py"),
]  # fmt: skip


def copy_tree(target: Path) -> None:
    """What the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, target / name, ignore=shutil.ignore_patterns("__pycache__", "experiments", "gpu")
            )
        else:
            shutil.copy(source, target / name)


def run_tests(folder: Path, tests: str) -> tuple[str, float]:
    """("passed" | "failed" | "clock" | "broken", seconds): only failing tests count as failed, not missing ones."""
    command = f'"{sys.executable}" -m pytest -x -q -p no:cacheprovider -p no:xdist {tests}'
    environment = {
        **os.environ,
        "HYPOTHESIS_PROFILE": "ci",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(folder),
    }
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, timeout=LIMIT, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return "clock", time.monotonic() - start
    outcome = {0: "passed", 1: "failed"}.get(done.returncode, "broken")
    return outcome, time.monotonic() - start


def mutate(folder: Path, mutation: Mutation) -> bool:
    """Replace the rule in a copy; False where its text does not occur exactly once."""
    path = folder / "reference" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return False
    path.write_text(text.replace(mutation.old, mutation.new))
    return True


def check(mutation: Mutation) -> tuple[Mutation, str, float]:
    """One mutation in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_tree(folder)
        if not mutate(folder, mutation):
            return mutation, "DID NOT APPLY", 0.0
        outcome, seconds = run_tests(folder, mutation.tests)
    words = {
        "failed": "caught",
        "passed": "SURVIVED",
        "clock": "RAN OUT OF TIME",
        "broken": "TESTS DID NOT RUN",
    }
    return mutation, words[outcome], seconds


def sound(tests: str) -> tuple[str, str]:
    """A selection of tests in an untouched copy: a mutation counts only where they pass without it."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_tree(Path(name))
        return tests, run_tests(Path(name), tests)[0]


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the check and print its table."""
    parser = argparse.ArgumentParser(description="Break one rule at a time and see the tests object.")
    parser.add_argument("names", nargs="*", help="words of the mutations' names or files; all by default")
    parser.add_argument("--list", action="store_true", help="only list them")
    options = parser.parse_args(arguments)
    chosen = [
        m for m in MUTATIONS if not options.names or any(n in f"{m.file} {m.name}" for n in options.names)
    ]
    if options.list:
        for mutation in chosen:
            say(f"{mutation.file:16} {mutation.name:46} {mutation.tests}")
        return 0
    with ThreadPoolExecutor(WORKERS) as pool:
        unsound = [(t, o) for t, o in pool.map(sound, sorted({m.tests for m in chosen})) if o != "passed"]
        for tests, outcome in unsound:
            say(f"without any mutation: {outcome}: {tests}")
        if unsound:
            return 1
        bad = 0
        for mutation, verdict, seconds in pool.map(check, chosen):
            say(f"{verdict:18} {seconds:5.0f} s  {mutation.file:16} {mutation.name}")
            bad += verdict != "caught"
    say(f"{len(chosen)} mutations, {bad} problems")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
