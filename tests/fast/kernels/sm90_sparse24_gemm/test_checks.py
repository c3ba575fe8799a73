"""What the GPU script says of its checks: lines, counts and rows."""

import json

import pytest
import torch

from fast.kernels.sm90_sparse24_gemm.variants import Variant
from tests.gpu.sparsity.products import checks, exact
from tests.gpu.sparsity.products.checks import Check, counts, found_by, write
from tests.gpu.sparsity.products.exact import Wrong
from tests.gpu.sparsity.products.inputs import case

FP8, MIXED = ("float8_e4m3fn",) * 2, ("float8_e4m3fn", "float8_e5m2")
SMALL, LARGE = Variant(16, 1, 2, 12, 1, 4), Variant(128, 2, 1, 8, 2, 1)
WRONG = Wrong(
    "5 of 100 differ, first at [0, 64]: 1.0, not 2.0", (128, 256, 1024), "bfloat16", 5, 100, (0, 64)
)


def test_a_wrong_variant_is_one_line():
    assert Check(LARGE, MIXED, WRONG).line() == (
        "WRONG t128g2p1s8c2k1 e4m3fn x e5m2 128x256x1024 bfloat16: 5 of 100 differ, first at [0, 64]: 1.0, not 2.0"
    )


def test_counts_by_what_variants_have_in_common():
    found = list(counts([Check(SMALL, FP8, None), Check(LARGE, FP8, WRONG), Check(LARGE, MIXED, WRONG)]))
    assert "  wrong by tokens: 16 0/1, 128 2/2" in found
    assert "  wrong by dtypes: e4m3fn 1/2, e4m3fn x e5m2 1/1" in found
    assert len(found) == len(checks.AXES)
    repeated = [Check(LARGE, FP8, WRONG, True), Check(SMALL, FP8, WRONG, True, WRONG)]
    assert list(counts(repeated))[-1] == (
        "  1 of 2 wrong ones are right serially; not: t16g1p2s12c1k4 e4m3fn"
    )


def test_all_checks_are_written(tmp_path):
    write([Check(SMALL, FP8, None), Check(LARGE, FP8, WRONG)], tmp_path / "out")
    right, wrong = json.loads((tmp_path / "out" / "linear_sparse_checks.json").read_text())
    assert (right["variant"], right["right"], wrong["right"]) == (SMALL.name, True, False)
    assert (wrong["differ"], wrong["first"], wrong["shape"], wrong["tokens"]) == (
        5,
        [0, 64],
        [128, 256, 1024],
        128,
    )


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_results_are_compared(monkeypatch, change):
    """The first element that differs, and how many."""
    one = case(16, 72, 160, (torch.bfloat16,) * 2, whole=True, device="cpu")
    y = exact.wanted(one, torch.bfloat16, True)
    y[3, 5] += change
    monkeypatch.setattr(exact, "run", lambda *given: (y, True))
    found = exact.compared(SMALL, one, torch.bfloat16)
    assert (found and (found.differ, found.count, found.first)) == (
        None if not change else (1, 16 * 72, (3, 5))
    )


def test_what_is_raised_is_wrong(monkeypatch):
    def fail(*given):
        raise RuntimeError("illegal access")

    monkeypatch.setattr(checks, "complaint", fail)
    said = []
    found = found_by((SMALL, FP8), said.append)
    assert found.text == said[0] == "RuntimeError: illegal access"
