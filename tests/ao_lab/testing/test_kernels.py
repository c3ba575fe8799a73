"""`probe_kernel`: every fault of the bank is found and named, no right kernel is, and what it takes."""

import re

import numpy as np
import pytest
import torch

import fast
import reference
from ao_lab import testing
from ao_lab.testing.kernels import KernelReport, probe_kernel
from reference import SCHEMES
from reference.matmul.linear import transposed
from reference.probe.detect import rounded
from reference.probe.faults import FAULTS, RIGHT, Case, typical_inputs, typical_weight

SMALL = {"x": typical_inputs(140, 384), "w": typical_weight(48, 384)}
PAIRS = {"fp8_rowwise": "fp8_rowwise", "fp8_1x128": "fp8_128x128", "int8_rowwise": "int8_rowwise", "mxfp8_e4m3": "mxfp8_e4m3",
         "nvfp4": "nvfp4", "fp8_tensorwise": "fp8_tensorwise", "int8_rowwise_asymmetric": "int8_rowwise"}  # fmt: skip


def kernel_of(outputs, scheme, dtype="float32"):
    """A kernel (x, w) of a function of a case."""

    def kernel(x, w):
        arrays = (np.asarray(one, np.float32) for one in (x, w))
        case = Case(*arrays, SCHEMES[scheme], SCHEMES[PAIRS[scheme]])
        y = outputs(case)
        return rounded(case.right if y is None else y, dtype)

    return kernel


def named(scheme, dtype, **settings):
    """Of each fault that a scheme can have what is found, and of each right kernel."""
    given = dict(scheme=scheme, weight_scheme=PAIRS[scheme], library="numpy", dtype=dtype, **settings)
    whole = Case(
        np.ones((70, 768), np.float32),
        np.ones((128, 768), np.float32),
        SCHEMES[scheme],
        SCHEMES[PAIRS[scheme]],
    )
    wrong = {name: fault for name, fault in FAULTS.items() if fault.outputs(whole) is not None}
    found = {
        name: probe_kernel(kernel_of(fault.outputs, scheme, dtype), **given) for name, fault in wrong.items()
    }
    right = {name: probe_kernel(kernel_of(kernel, scheme, dtype), **given) for name, kernel in RIGHT.items()}
    return found, right


def test_every_fault_is_named_and_no_right_kernel():
    found, right = named("fp8_rowwise", "float32", **SMALL)
    assert len(found) == 22
    assert {name: report.looks_like for name, report in found.items()} == {name: name for name in found}
    assert {name: str(report) for name, report in right.items() if not report.ok} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", PAIRS)
def test_every_scheme(scheme, dtype):
    """A hundred right kernels in all, and every fault."""
    found, right = named(scheme, dtype)
    # In 16 bits the error of 14-bit sums is below that of codes that may differ at ties: see the next test.
    unseen = {"short accumulator"} if dtype == "bfloat16" else set()
    assert {name for name, report in found.items() if report.ok} <= unseen
    assert {name: str(report) for name, report in right.items() if not report.ok} == {}


def test_short_sums_show_in_sixteen_bits_where_codes_are_given():
    def product(x, w):
        y = reference.matmul(x, transposed(w), accumulation="hopper_fp8")
        return rounded(np.asarray(y, np.float64), "bfloat16")

    sizes = {"x": typical_inputs(100, 768), "w": typical_weight(48, 768)}
    settings = dict(operands="quantized", library="numpy", dtype="bfloat16", **sizes)
    assert probe_kernel(product, **settings).looks_like == "short accumulator"
    assert probe_kernel(product, accumulation="fast", **settings).ok


def test_a_kernel_of_torch():
    """A bfloat16 kernel that scales, casts and multiplies; and one whose scales come from the wrong rows."""

    def linear(x, w, shift=0):
        scales = [one.float().abs().amax(1, keepdim=True).clamp_min(1e-30) / 448 for one in (x, w)]
        a, b = (
            (one.float() / s).to(torch.float8_e4m3fn).float() for one, s in zip((x, w), scales, strict=True)
        )
        return ((a @ b.T) * scales[0].roll(shift, 0) * scales[1].T).to(x.dtype)

    report = testing.probe_kernel(linear, dtype="bfloat16")
    assert report.ok, report
    assert "a right kernel" in str(report)
    broken = testing.probe_kernel(lambda x, w: linear(x, w, 1), dtype="bfloat16")
    assert broken.looks_like == "rows shifted"
    assert broken.explained > 0.99
    assert (
        "a faulty kernel; it looks like 'rows shifted': Each row of the input by the scale of the one before"
        in str(broken)
    )


def rowwise(x, w, least=1e-30):
    """Scales, casts and multiplies as the specification does."""
    scales = [one.abs().amax(1, keepdim=True).clamp_min(least) / 448 for one in (x, w)]
    a, b = ((one / s).to(torch.float8_e4m3fn).float() for one, s in zip((x, w), scales, strict=True))
    return (a @ b.T) * scales[0] * scales[1].T


def without_last_outputs(x, w):
    y = rowwise(x, w)
    y[:, len(w) // 8 * 8 :] = 0
    return y


def without_one_output(x, w):
    y = rowwise(x, w)
    y[3, 7] = 0
    return y


def in_place(x, w):
    y = rowwise(x, w)
    x.mul_(2)
    return y


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (lambda x, w: rowwise(x, w, 0.0), "NaN in a token, zeros in another: .* are inf or NaN where the right"),
        (without_last_outputs, "other lengths: error of channel"),
        (lambda x, w: rowwise(x[:, : x.shape[1] // 16 * 16], w[:, : w.shape[1] // 16 * 16]), "other lengths: error"),
        (without_one_output, r"output \(3, 7\)"),
        (in_place, "inputs as they are: the kernel changed its operands"),
        (lambda x, w: x @ w.T, "w is not quantized: error"),
        (lambda x, w: x @ fast.fake_quantize(w, "fp8_rowwise").T, "x is not quantized"),
    ],
)  # fmt: skip
def test_faults_of_a_whole_kernel(kernel, said):
    """A row of zeros, tails of N and of K, one output, operands that change, and none or one that is quantized."""
    report = probe_kernel(kernel, **SMALL)
    assert not report.ok
    assert re.search(said, str(report)), report


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "mxfp8_e4m3"])
@pytest.mark.parametrize(
    ("at", "factor", "said"),
    [
        (np.s_[128:], 1.05, "times 1.05"),
        (np.s_[-17:], 1.05, "times 1.05"),
        (np.s_[3], 1.05, "all of token 3 times 1.05"),
        (np.s_[:, 5], 1.05, "all of channel 5 times 1.05"),
        (np.s_[:, 20], 1.01, "all of channel 20 times 1.01"),
        (np.s_[3, 5], 1.5, r"output \(3, 5\) is off by"),
        (np.s_[3, 5], 1.01, r"output \(3, 5\) is off by"),
    ],
)
def test_a_part_of_another_scale_is_neither_ties_nor_a_convention(scheme, at, factor, said):
    def kernel(x, w):
        y = torch.from_numpy(kernel_of(lambda case: case.right, scheme)(x.numpy(), w.numpy()))
        y[at] *= factor
        return y

    report = probe_kernel(kernel, scheme=scheme, **SMALL)
    assert not report.ok
    assert re.search(said, str(report)), report


def test_8_bits_with_other_scales_beside_4():
    """x is quantized, though its error is a small part, and other codes are no error of sums; x that is not is told of."""

    def kernel(x, w):
        scale = torch.exp2((x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 448).log2().ceil())
        return (x / scale).to(torch.float8_e4m3fn).float() * scale @ fast.fake_quantize(w, "mxfp4").T

    given = {"scheme": "fp8_rowwise", "weight_scheme": "mxfp4"}
    report = probe_kernel(kernel, **given)
    assert report.ok, report
    assert "another convention of scales or of rounding" in str(report)
    report = probe_kernel(lambda x, w: x @ fast.fake_quantize(w, "mxfp4").T, **given)
    assert "x is not quantized" in str(report)


@pytest.mark.parametrize(
    "scale_of",
    [lambda amax: (amax / 127).bfloat16().float(), lambda amax: amax / 127.5],
    ids=["bfloat16", "127.5"],
)
def test_scales_of_another_convention(scale_of):
    """A right W4A8 kernel that stores the scales of x in bfloat16, or maps amax onto 127.5: said, and no fault."""

    def kernel(x, w):
        scale = scale_of(x.abs().amax(1, keepdim=True).clamp_min(1e-30))
        return (x / scale).round().clamp(-127, 127) * scale @ fast.fake_quantize(w, "int4_g32").T

    report = probe_kernel(kernel, scheme="int8_rowwise", weight_scheme="int4_g32", **SMALL)
    assert report.ok, report
    assert report.other_scales
    assert not report.same_values
    assert report.exact_outputs
    assert str(report).startswith("a right kernel, as far as")
    said = "of another convention than the specification's, so that sums were compared on inputs alone that any scales"
    assert said in str(report)


@pytest.mark.parametrize(
    ("scheme", "scale_of"),
    [
        ("fp8_rowwise", lambda amax: torch.exp2((amax / 448).log2().ceil())),
        ("int8_rowwise", lambda amax: amax / 127.5),
    ],
)
@pytest.mark.parametrize("at", [np.s_[128:], np.s_[3], np.s_[:, 5], np.s_[3, 5]])
def test_a_wrong_part_beside_another_convention_of_scales(scheme, scale_of, at):
    """Which changes outputs of a layer's inputs by more: the whole passes, 1% of a part is found, in bfloat16 too."""

    def kernel(x, w, factor=1.0):
        scales = [scale_of(one.float().abs().amax(1, keepdim=True).clamp_min(1e-30)) for one in (x, w)]
        cast = (lambda q: q.to(torch.float8_e4m3fn).float()) if scheme == "fp8_rowwise" else torch.round
        a, b = (cast(one.float() / s) for one, s in zip((x, w), scales, strict=True))
        y = (a.clamp(-448, 448 if scheme == "fp8_rowwise" else 127) @ b.T) * scales[0] * scales[1].T
        y[at] *= factor
        return y.to(x.dtype)

    report = probe_kernel(kernel, scheme=scheme, dtype="bfloat16", **SMALL)
    assert report.ok, report
    report = probe_kernel(lambda x, w: kernel(x, w, 1.01), scheme=scheme, dtype="bfloat16", **SMALL)
    assert "inputs that any scales hold exactly" in str(report), report


def test_calls_that_differ_and_lengths_that_a_kernel_refuses():
    calls = []

    def kernel(x, w):
        calls.append(tuple(w.shape))
        if len(w) % 8:
            raise RuntimeError(f"N is a multiple of 8, not {len(w)}")
        y = rowwise(x, w)
        y[0] *= 2 if len(calls) == 3 else 1
        return y

    report = probe_kernel(kernel, **SMALL)
    assert "inputs as they are, call 3: error of token 0" in str(report)
    assert (
        "not tried, as it raises RuntimeError (N is a multiple of 8, not 41): M, N, K = (135, 41, 381)"
        in str(report)
    )
    report = probe_kernel(kernel, **SMALL)
    assert report.ok
    assert "nearest to a fault" in str(report)
    assert (135, 32, 368) not in calls
    assert (32, 368) in calls


def test_calls_that_differ_within_the_bound_are_a_remark_and_beyond_it_a_fault():
    """Atomic additions in another order; a race that spoils one output of one call, of scales of another convention too."""
    calls = []

    def kernel(x, w, spoilt=0.0):
        calls.append(len(calls))
        order = np.random.default_rng(len(calls)).permutation(x.shape[1])
        y = rowwise(x[:, order], w[:, order])
        y[5, 7] += spoilt * float(y[y.isfinite()].std()) * (len(calls) == 3)
        return y

    report = probe_kernel(kernel, **SMALL)
    assert report.ok, report
    assert "not deterministic" in str(report)
    for like in (kernel, lambda x, w, spoilt: kernel(x, w, spoilt) * (1 + 2.0**-9)):
        calls.clear()
        report = probe_kernel(lambda x, w, like=like: like(x, w, 0.02), **SMALL)
        assert "inputs as they are, call 3: output (5, 7)" in str(report)


def test_ties_that_are_rounded_away_from_zero_are_told():
    def kernel(x, w, rounded=torch.round):
        scales = [one.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127 for one in (x, w)]
        a, b = (rounded(one / s) for one, s in zip((x, w), scales, strict=True))
        return (a @ b.T) * scales[0] * scales[1].T

    report = probe_kernel(kernel, scheme="int8_rowwise", **SMALL)
    assert (report.ok, report.ties) == (True, True)
    report = probe_kernel(
        lambda x, w: kernel(x, w, lambda q: q.sign() * (q.abs() + 0.5).floor()),
        scheme="int8_rowwise",
        **SMALL,
    )
    assert (report.ok, report.ties) == (True, False)
    assert "except at ties of rounding" in str(report)


def trunc_e4m3(q):
    """To float8_e4m3fn toward zero."""
    near = q.to(torch.float8_e4m3fn)
    return (
        (near.view(torch.uint8) - (near.float().abs() > q.abs()).to(torch.uint8))
        .view(torch.float8_e4m3fn)
        .float()
    )


@pytest.mark.parametrize(
    ("scheme", "top", "cast", "looks"),
    [
        ("int8_rowwise", 127, torch.round, None),
        ("int8_rowwise", 127, torch.trunc, "truncated cast"),
        ("int8_rowwise", 120, torch.floor, ""),
        ("fp8_rowwise", 448, trunc_e4m3, "truncated cast"),
    ],
)
def test_casts_to_8_bits_beside_a_weight_of_4(scheme, top, cast, looks):
    """Which adds a few percent to the error of the weight's rounding; with other scales too."""

    def kernel(x, w):
        scale = x.float().abs().amax(1, keepdim=True).clamp_min(1e-30) / top
        y = cast(x.float() / scale) * scale @ fast.fake_quantize(w.float(), "int4_g32").T
        return y.to(x.dtype)

    for dtype in ("float32", "bfloat16"):
        report = probe_kernel(kernel, scheme=scheme, weight_scheme="int4_g32", dtype=dtype, **SMALL)
        assert report.ok == (looks is None), report
        assert looks is None or report.looks_like == looks
        assert looks is None or "each value of x alone: values are rounded to one side, by 0." in str(report)


def test_one_value_that_many_ties_hide():
    """In bfloat16 a sum may be off by many values at ties; an output that is off by less shows where it is one value."""

    def kernel(x, w, more=0.0):
        values = [fast.fake_quantize(one.float(), "int8_rowwise") for one in (x, w)]
        unit = [one.float().abs().amax(1, keepdim=True) / 127 for one in (x, w)]
        y = values[0] @ values[1].T
        y[3, 5] += more * unit[0][3, 0] * w[5].float().abs().max()
        return y.to(x.dtype)

    halves = np.random.default_rng(0).integers(-253, 254, SMALL["x"].shape).astype(np.float32) / 2
    halves[:, 0] = 127
    given = {"scheme": "int8_rowwise", "dtype": "bfloat16", "x": halves, "w": SMALL["w"]}
    assert probe_kernel(kernel, **given).ok
    report = probe_kernel(lambda x, w: kernel(x, w, 1.0), **given)
    assert [one.case for one in report.faults] == ["each value of x alone"], report
    assert "each value of x alone: output (3, 5) is off by" in str(report)


def test_a_kernel_of_quantized_operands_and_one_of_weights_alone():
    def product(x, w):
        x = reference.dequantize(x, "float32") if hasattr(x, "codes") else x
        return x @ reference.dequantize(w, "float32").T

    report = probe_kernel(product, scheme="mxfp8_e4m3", operands="quantized", **SMALL)
    assert report.ok, report
    report = probe_kernel(
        product, scheme=None, weight_scheme="int4_g32", operands="quantized", library="numpy", **SMALL
    )
    assert report.ok, report
    wrong = probe_kernel(
        lambda x, w: product(x[:, :-16], reference.quantize(reference.dequantize(w)[:, :-16], "int8_rowwise")),
        scheme=None, weight_scheme="int4_g32", operands="quantized", library="numpy", **SMALL,
    )  # fmt: skip
    assert not wrong.ok


def test_an_error_that_no_fault_explains():
    noise = np.random.default_rng(0)
    report = probe_kernel(
        kernel_of(lambda c: c.right + noise.standard_normal(c.right.shape) * abs(c.right).mean(), "fp8_rowwise"),
        library="numpy", **SMALL,
    )  # fmt: skip
    assert (report.ok, report.looks_like) == (False, "")
    assert "like none of the bank" in str(report)
    assert isinstance(report, KernelReport)


@pytest.mark.parametrize(
    ("kernel", "settings", "kind", "said"),
    [
        (lambda x, w: x, {}, ValueError, "returned shape"),
        (lambda x, w: 3, {}, TypeError, "no array"),
        (
            lambda x, w: (x @ w.T).bfloat16(),
            {},
            TypeError,
            "returned bfloat16 for dtype='float32'; where its operands",
        ),
        (lambda x, w: x @ w.T, {"dtype": "int8"}, ValueError, "dtype"),
        (lambda x, w: x @ w.T, {"scheme": None}, ValueError, "neither operand"),
        (lambda x, w: x @ w.T, {"x": np.ones((9, 9)), "w": np.ones((9, 8))}, ValueError, "with 8 tokens"),
        (lambda x, w: x @ w.T, {"x": np.full((9, 32), np.nan)}, ValueError, "finite"),
    ],
)
def test_wrong_input(kernel, settings, kind, said):
    with pytest.raises(kind, match=said):
        probe_kernel(kernel, **settings)


def test_outputs_that_are_not_finite_are_counted_in_words():
    def kernel(case):
        y = case.right.copy()
        y[0, :3] = np.inf
        return y

    report = probe_kernel(kernel_of(kernel, "fp8_rowwise"), library="numpy", **SMALL)
    size = report.faults[0].test.split()[2]
    assert f"inputs as they are: 3 of {size} outputs are inf or NaN where the right ones are finite" in str(
        report
    )


def test_an_unknown_kind_has_the_nearest_named():
    with pytest.raises(ValueError, match="unknown kind 'nomals'; the nearest are normals"):
        testing.fill("nomals", (2, 2))
