"""Fit the model of `linear_sparse`'s choice to times, and say what its choice loses. No GPU is needed.

    PYTHONPATH=. python tests/gpu/sparsity/wgmma/fit_linear_sparse.py linear_sparse_model.json

The file is what `validate_linear_sparse.py --model` writes, or `reports/data/linear_sparse_times.json`. Prints the constants
for `fast.kernels.sm90_sparse24_gemm.select.Rates`, how far predictions are off, and for each shape what the model takes of
what was timed, before and after.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from fast.kernels.sm90_sparse24_gemm.select import RATES, Rates
from tests.gpu.sparsity.wgmma.model_fit import choices, described_now, fitted, spread


def main(arguments: list[str]) -> int:
    """Read, fit, report."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    content = json.loads(Path(arguments[0]).read_text())
    rows = described_now(content["rows"])
    found = fitted(rows)
    print(f"{content['device']}: Rates({', '.join(f'{k}={v:.4g}' for k, v in found._asdict().items())})")
    for name, rates in (("before", RATES), ("fitted", found)):
        report(name, rows, rates)
    return 0


def report(name: str, rows: list[dict[str, object]], rates: Rates) -> None:
    """How far predictions are off, and every choice that is not the quickest."""
    made = choices(rows, rates)
    worst = max(one.regret for one in made)
    mean = sum(one.regret for one in made) / len(made)
    off = f"predictions off by {spread(rows, rates):.1%}"
    print(
        f"{name}: {off}, choices slower than the quickest by {mean - 1:.1%} in the mean, {worst - 1:.1%} at most"
    )
    for one in sorted(made, key=lambda one: -one.regret):
        if one.regret > 1:
            shape = "x".join(map(str, one.shape))
            print(f"    {shape} {one.dtype}: {one.name}, {one.regret:.3f} of {one.best}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
