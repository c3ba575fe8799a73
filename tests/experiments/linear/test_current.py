"""Which lines were measured with the kernels that are chosen today."""

from dataclasses import replace

import pytest

from experiments.harness.rows import Row
from experiments.linear import current, page
from experiments.linear.current import kernel_state, outdated
from fast.gemm import families

ROW = Row(
    experiment="linear", table="weights/full/14336x4096", setting="1 row, CUDA graph", method="int4 g128",
    metric="speed over bfloat16", value=2.0, unit="", device="NVIDIA H200", seed=0, kernel="fused: linear_skinny",
)  # fmt: skip


def test_kernels_are_compared_by_the_names_that_they_have_today():
    assert (kernel_state(ROW), outdated(ROW)) == (current.TODAY, "")
    at_1024 = replace(ROW, setting="1024 rows, CUDA graph", kernel="fused: mixed_mm")
    assert kernel_state(at_1024) == current.TODAY
    assert outdated(replace(at_1024, kernel="dequantize")) == (
        "measured with kernel dequantize; today sm90_w4a16_gemm is chosen"
    )
    assert "kernel triton_small_m" in outdated(replace(ROW, kernel="fused: linear_small_kernel + sum"))


@pytest.mark.parametrize(
    ("part", "method", "rows", "family"),
    [
        ("weights", "int3 g32", 16, families.SM90_INTN_SMALL_M),
        ("weights", "int3 g32", 512, families.TORCH_DEQUANTIZE),
        ("activations", "int8 dynamic", 1, families.TRITON_GEMV_W8A8),
        ("activations", "int8 dynamic", 2048, families.SM90_S8_GEMM),
        ("activations", "fp8 dynamic, blocks", 64, families.TORCH_SCALED_MM),
        ("activations", "nvfp4 dynamic", 16, families.TRITON_SMALL_M),
    ],
)
def test_the_family_of_today(part, method, rows, family):
    assert current.family_today(part, "14336x4096", method, rows) is family


def test_experts_are_asked_for_by_rows_of_one():
    assert current.family_today("experts", "8x14336x4096", "int4 g128", 16) is families.TRITON_SMALL_M
    assert current.family_today("experts", "8x14336x4096", "int4 g128", 4096) is families.SM90_W4A16_GEMM


def test_a_kernel_that_has_no_name_must_have_existed(monkeypatch):
    unnamed = replace(ROW, method="int2 g32", kernel="fused", commit="36c4f92b")
    for there, state in ((True, current.UNNAMED), (None, current.UNNAMED), (False, current.OTHER)):
        current._compared.cache_clear()
        monkeypatch.setattr(current, "existed", lambda family, commit, there=there: there)
        assert kernel_state(unnamed) == state
    assert outdated(unnamed) == "measured before kernel sm90_intn_small_m, which is chosen today"
    current._compared.cache_clear()


@pytest.mark.parametrize(
    "other",
    [{"device": "NVIDIA A100"}, {"method": "torchao int4wo", "kernel": "torchao"}, {"kernel": ""}, {"setting": "status"}],
)  # fmt: skip
def test_nothing_is_said_of_what_no_kernel_is_chosen_for(other):
    assert (kernel_state(replace(ROW, **other)), outdated(replace(ROW, **other))) == ("", "")


def test_lines_of_other_kernels_are_in_no_finding_figure_or_target():
    base = replace(ROW, method="bfloat16", kernel="torch", value=1.0)
    rows = [base, ROW, replace(base, metric=page.TIME), replace(ROW, metric=page.TIME)]
    assert page.cards([*rows, replace(ROW, method=page.DEFAULT)])
    assert any("int4 g128" in one.name and one.value for one in targets(rows))
    old = [replace(row, kernel="dequantize") if row.kernel != "torch" else row for row in rows]
    assert not page.cards([*old, replace(ROW, method=page.DEFAULT, kernel="dequantize")])
    assert not any(one.value for one in targets(old))
    (section,) = page.sections(old)
    assert "**1 of 1 lines" in " ".join(section.paragraphs)
    (drawing,) = section.drawings
    assert drawing.empty or "not measured with the kernel that is chosen today" in drawing.caption


def targets(rows):
    return [one for run in page.targets_by_run(rows) for one in run.targets]
