"""Calls from JAX beside torch's: what is timed, what becomes of it, and what is not timed."""

import types
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fast
import reference
from experiments.harness.measuring import Wrong
from experiments.harness.rows import Journal
from experiments.kernels import page, run
from experiments.kernels.cases import CASES
from experiments.kernels.operations import Sample
from experiments.kernels.run import check, raw, same, samples
from tests.experiments.harness.tiny import SHAPE, bench, broken, flipped, measured, specified, values_of

# The gate before the clock: a result that differs from the reference in one bit gets no time.


@pytest.mark.parametrize("name", list(CASES))
def test_the_reference_passes_the_gate(name):
    fast, one = SimpleNamespace(**specified()), CASES[name].operation.startswith("linear")
    inputs = CASES[name].make(fast, SHAPE, "cpu", 0)
    # One row of inputs gives a number for each row of the weight.
    assert check(CASES[name], fast, inputs, SHAPE) >= (64 if one else 1000)


@pytest.mark.parametrize(
    ("name", "function", "change"),
    [
        ("quantize.mxfp8_e4m3", "quantize", flipped("codes")),
        ("quantize.mxfp8_e4m3", "quantize", flipped("codes", (0, 0))),
        ("quantize.mxfp8_e4m3", "quantize", flipped("scale")),
        ("quantize.fp8_128x128", "quantize", flipped("scale")),
        ("quantize.mxfp4.packed", "quantize", flipped("codes")),
        ("quantize.int4_g128_asymmetric", "quantize", flipped("zero")),
        ("quantize.mxfp8_e4m3.axis0", "quantize", flipped("codes", (5, -1))),
        ("quantize.fp8_tensorwise", "quantize", lambda q: replace(q, scale=q.scale * 2)),
        ("quantize.nvfp4.packed", "quantize", lambda q: replace(q, outer=q.outer * 2)),
        ("quantize.nf4", "quantize", flipped("codes")),
        ("both.mxfp8_e4m3", "quantize_both", lambda made: (made[0], flipped("codes", (0, 0))(made[1]))),
        ("rms_norm.fp8_rowwise", "rms_norm_quantize", lambda made: (flipped("codes")(made[0]), None)),
        ("rms_norm.fp8_rowwise.residual", "rms_norm_quantize", lambda made: (made[0], made[1] * 2)),
        ("swiglu.fp8_rowwise", "swiglu_quantize", flipped("codes")),
        ("dequantize.int4_g128", "dequantize", lambda values: values * 2),
        ("fake_quantize.int4_g32", "fake_quantize", lambda values: values.float()),
        ("encode.float8_e4m3fn", "encode", lambda codes: codes ^ 1),
        ("linear.int8_rowwise", "linear", lambda y: y * 1.02),
        ("linear.int4_g64_asymmetric_bf16", "linear", lambda y: y + y.abs().max() / 64),
        ("linear_of_codes.int8_rowwise", "linear_of_codes", lambda y: y * 1.01),
        ("linear_of_codes.fp8_rowwise", "linear_of_codes", lambda y: y * 1.02),
        ("linear_pair.int8_rowwise", "linear_pair", lambda made: (made[0], made[1] * 1.02)),
        ("linear_pair.int4_g128", "linear_pair", lambda made: (made[1], made[0])),
        ("linear_swiglu.int8_rowwise", "linear_swiglu", lambda y: y * (1 + 2.0**-7)),
        ("linear_swiglu.int4_g128", "linear_swiglu", lambda y: y.flip(1)),
        (
            "saturation_mask.int4_g128_asymmetric",
            "quantize.fake_quantize.fake_quantize_with_mask",
            lambda made: (-made[0], None),
        ),
    ],
)
def test_a_wrong_kernel_gets_no_time(name, function, change, tmp_path):
    fast = broken(function, change)
    inputs = CASES[name].make(reference, SHAPE, "cpu", 0)
    with pytest.raises(Wrong):
        check(CASES[name], fast, inputs, SHAPE)
    values = values_of(measured(tmp_path, [name], fast=fast), name)
    assert "time" not in values
    assert [metric for metric in values if metric.startswith("status: wrong: ")] != []


def test_samples_are_whole_blocks_at_both_ends():
    assert samples(CASES["quantize.fp8_rowwise"], (524289, 4096)) == [Sample(0, 32), Sample(524257, 524289)]
    assert samples(CASES["quantize.fp8_128x128"], (16384, 4096)) == [Sample(0, 128), Sample(16256, 16384)]
    assert samples(CASES["quantize.mxfp8_e4m3.axis0"], (16384, 4096)) == [Sample(0, 32), Sample(4064, 4096)]
    assert samples(CASES["small.fp8_rowwise"], (16, 4096)) == [Sample(0, 16)]


def test_bits_are_compared_and_not_values():
    assert same(("x", torch.tensor([0.0, float("nan")]), np.array([0.0, np.nan], np.float32))) == 2
    with pytest.raises(Wrong, match="1 of 2"):
        same(("x", torch.tensor([0.0, -0.0]), torch.zeros(2)))
    with pytest.raises(Wrong, match="the reference has"):
        same(("x", torch.zeros(2), torch.zeros(3)))
    with pytest.raises(Wrong, match="nothing"):
        same(("x", None, torch.zeros(3)))
    assert raw(torch.tensor(1.0, dtype=torch.bfloat16)).tolist() == 0x3F80


SIZES = {"a little": 32}


@pytest.fixture(scope="module", autouse=True)
def short():
    """Few calls of one scheme."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ROUNDS": 2,
            "WARMUP": 1,
            "PROGRAM": 2,
            "QUEUED": 0,
            "JAX_SCHEMES": ("int8_rowwise",),
        }.items():
            patch.setattr(run, name, value)
        yield


@pytest.fixture(scope="module")
def journal(short, tmp_path_factory):
    made = Journal()
    assert run.jax_measure(bench(tmp_path_factory.mktemp("jax"), fast=fast), made, SIZES) == []
    return made


def test_rows_have_every_way_to_call(journal):
    values = {row.metric: row.value for row in journal.rows}
    assert values["status: ok"] == 1
    for way in run.WAYS:
        assert values[f"{way} over torch"] == pytest.approx(values[way] / values["torch"])
        assert values[f"target: {way} over torch"] == 1.1


def test_a_second_run_takes_them_from_the_journal(journal, tmp_path):
    before = journal.rows
    assert run.jax_measure(bench(tmp_path, fast=None), journal, SIZES) == []
    assert journal.rows == before


def test_other_bits_get_no_time(tmp_path):
    def wrong(x, scheme):
        q = fast.quantize(x, scheme)
        return replace(q, codes=q.codes ^ 1)

    journal = Journal()
    failed = run.jax_measure(bench(tmp_path, fast=types.SimpleNamespace(quantize=wrong)), journal, SIZES)
    assert journal.rows == []
    (said,) = [row.metric for row in failed if row.metric.startswith("status")]
    assert said.startswith("status: wrong: eager: codes of tensor 0")
    assert not [row for row in failed if row.unit == "us"]


@pytest.mark.parametrize("way", run.WAYS)
def test_every_result_of_every_way_is_compared(way, monkeypatch):
    """One that is wrong in its last tensor alone is found, in the one way that has it."""
    from ao_lab import jax as functions

    tensors = [torch.full((2, 8), float(number), dtype=torch.bfloat16) for number in range(3)]
    right, seen = functions.quantize, []

    def one_wrong(x, scheme):
        q = right(x, scheme)
        seen.append(1)
        # Traced once for `jit` and once for each tensor of `program`, in the order of `calls_of`.
        number = {3: "eager", 4: "jit", 7: "program"}.get(len(seen))
        return replace(q, codes=q.codes ^ 1) if number == way else q

    monkeypatch.setattr(functions, "quantize", one_wrong)
    first = 0 if way == "jit" else 2
    with pytest.raises(Wrong, match=f"^{way}: codes of tensor {first}:"):
        run.jax_calls_of(fast, "int8_rowwise", tensors)


def test_torch_quantizes_as_many_tensors_as_a_program():
    taken = []

    def quantize(x, scheme):
        taken.append(x)
        return fast.quantize(x, scheme)

    tensors = [torch.ones(2, 8, dtype=torch.bfloat16) for _ in range(3)]
    calls, divisors = run.jax_calls_of(types.SimpleNamespace(quantize=quantize), "int8_rowwise", tensors)
    taken.clear()
    calls[run.TORCH]()
    assert [id(x) for x in taken] == [id(x) for x in tensors]
    assert set(divisors.values()) == {3}


def test_without_jax_there_are_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "installed", lambda: False)
    assert run.jax_measure(bench(tmp_path), Journal(), SIZES) == []


def test_queued_calls_are_timed_per_quantization():
    ticks = iter(range(10_000))

    class Done:
        def block_until_ready(self):
            pass

    calls = {"one": Done, "eight": Done}
    times = run.queued(calls, {"one": 1, "eight": 8}, 16, lambda: float(next(ticks)))
    # A tick passes from the first call to the last: of 16 calls, or of two that are eight each.
    assert times == {"one": 1 / 16, "eight": 1 / 16}


def test_the_page_names_what_takes_longer(journal):
    fixed = {"eager over torch": 1.5, "jit over torch": 1.05, "program over torch": 1.0}
    rows = [replace(row, value=fixed.get(row.metric, row.value)) for row in journal.rows]
    (section,) = page.jax_sections(rows)
    assert (
        "**More than 1.1 times torch's time: 1.** int8_rowwise of a little (eager 1.50)."
        in section.paragraphs
    )
    (line,) = section.tables[0].lines
    assert line[:2] == ["int8_rowwise", "a little"]
    assert line[-4:] == ["1.50", "1.05", "1.00", ""]
    assert page.sections(rows)[-1].title == section.title
    assert page.jax_sections([]) == []
