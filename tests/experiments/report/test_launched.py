"""Which rows were measured with kernels that still run: by the sources, and by what is chosen for a product today."""

from dataclasses import replace
from functools import partial

import pytest

from experiments.harness.paths import Paths
from experiments.harness.rows import ROOT, Row, read
from experiments.kernels import page as kernels
from experiments.kernels import results
from experiments.report import launched
from experiments.report.content import note
from experiments.sparsity import page as sparsity
from experiments.sparsity import products
from fast.gemm import families

ROW = Row(
    experiment="kv_cache", table="speed/full/x", setting="1", method="int8", metric="time", value=1.0, unit="us",
    device="NVIDIA H200", seed=0, kernel="rows_kernel + sm90_decode",
)  # fmt: skip
CASE = replace(
    ROW, experiment="kernels", table="kernels/full/random-normal", setting="14336x4096", metric="fraction",
    method="linear_of_codes.int8_rowwise.rows1024", kernel="dense_mm",
)  # fmt: skip
PRODUCT = replace(
    ROW, experiment="sparsity", table=f"{products.KIND}/full/{sparsity.LARGEST}", method=products.OWN, kernel="sparse_mm",
    setting=products.SETTINGS[products.FP8], metric="speed over dense",
)  # fmt: skip


def test_functions_are_those_of_the_sources():
    assert {
        "blocks_kernel",
        "sm90_decode",
        "triton_gemv_any_kernel",
        "sm90_w4a16_gemv",
    } <= launched.functions()
    assert not {"missing_kernel", "launch", "choose"} & launched.functions()
    assert {*launched.FORMER.values()} <= launched.functions()
    assert not {*launched.FORMER} & launched.functions()


@pytest.mark.parametrize(
    ("kernel", "state"),
    [
        ("rows_kernel + sm90_decode", launched.TODAY),
        ("gemv_any_kernel", launched.TODAY),
        ("sm90_decode + removed_kernel", launched.OTHER),
        ("nvjet_sm90_tst_64x16_64x16_2x1_v_bz_TNT + removed_kernel", launched.OTHER),
        ("nvjet_sm90_tst_64x16_64x16_2x1_v_bz_TNT + cublasLt::splitKreduce_kernel", ""),
        (
            "triton_poi_fused_ones_0 + triton_tem_fused__to_copy_flex_attention_ones_slice_sort_sum + 1 more",
            "",
        ),
        ("", ""),
    ],
)
def test_a_kernel_of_ours_is_in_the_sources_or_not(kernel, state):
    row = replace(ROW, kernel=kernel)
    assert launched.kernel_state(row) == state
    assert bool(launched.outdated(row)) == (state == launched.OTHER)


def test_committed_rows_name_no_kernel_that_is_neither_ours_nor_a_librarys():
    """A library's new spelling belongs in LIBRARIES, a new name of ours in FORMER; else its rows would be called outdated."""
    places = Paths.default(ROOT / "reports")
    rows = [
        row
        for name in ("kernels", "kv_cache", "prefill_attention", "loka")
        for row in read(places.rows(name))
    ]
    names = {name for row in rows for name in launched.ours(row.kernel)}
    assert len(names) > 30
    assert names <= launched.functions()


def test_products_are_compared_with_the_family_of_today():
    pytest.importorskip("triton")
    assert results.family_of("linear.int4_g64_asymmetric_bf16", "14336x4096") is families.TRITON_GEMV_W4A16
    assert results.family_of("quantize.mxfp4", "8192x8192") is results.family_of("x", "8192x8192") is None
    assert kernels.kernel_state(CASE) == launched.TODAY
    few = replace(CASE, kernel="int_scaled_mm_kernel")
    assert kernels.kernel_state(few) == launched.OTHER
    assert results.outdated(few) == "measured with kernel triton_int_scaled_mm; today sm90_s8_gemm is chosen"
    # What is chosen for a Hopper GPU says nothing of another.
    assert kernels.kernel_state(replace(few, device="NVIDIA B200")) == launched.TODAY
    assert (sparsity.kernel_state(PRODUCT), products.family_today(PRODUCT)) == (
        launched.TODAY, families.SM90_SPARSE24_GEMM,
    )  # fmt: skip
    assert products.family_today(replace(PRODUCT, method="dense")) is None


def test_lines_of_other_kernels_have_no_value_and_no_target():
    target = replace(CASE, metric="target: fraction", value=0.9)
    rows = [CASE, target]
    assert [one.reached for run in results.targets_by_run(rows) for one in run.targets] == [True]
    old = [replace(row, kernel="removed_kernel") for row in rows]
    assert [one for run in results.targets_by_run(old) for one in run.targets] == []
    (line,) = next(iter(results.results_of(old).values()))
    assert (line.values, line.verdict) == (
        {},
        "not measured: measured with kernel removed_kernel, which is in no source any more",
    )


def test_pages_say_which_lines_are_of_other_kernels():
    old = replace(PRODUCT, kernel="removed_kernel")
    assert [len(sparsity.cards([one])) for one in (PRODUCT, old)] == [1, 0]
    (section, *_) = sparsity.product_sections([replace(old, metric="time")])
    assert "**Other kernels than today's: 1.**" in " ".join(section.paragraphs)
    again = replace(ROW, setting="2", kernel="removed_kernel")
    assert note([ROW, again]).endswith("; 1 of 2 lines with another kernel than is chosen today")
    assert note([ROW]).endswith("; by the kernels that are chosen today")
    silent = replace(ROW, kernel="", setting="2")
    assert note([ROW, silent]).endswith("; 1 of 2 lines do not say by which kernel; today's may be another")
    peers = [replace(silent, method=name) for name in ("bfloat16", "torchao int8wo", "transformers' cache")]
    others = [
        replace(silent, device="cpu"),
        replace(silent, unit="%"),
        replace(ROW, kernel="", metric="host"),
    ]
    assert note([ROW, *peers, *others]).endswith("; by the kernels that are chosen today")
    told = partial(launched.outdated_words, chosen=lambda row: families.SM90_SPARSE24_GEMM)
    assert told([replace(ROW, kernel="blocks_kernel")]) == []
