"""The model of the choice, fitted to times that were made up: constants come back, and so does what a choice loses."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import fast
from fast.kernels.sm90_sparse24_gemm.select import RATES, Rates, Terms, choose
from tests.gpu.sparsity.products.timing import Method
from tests.gpu.sparsity.wgmma import model_times
from tests.gpu.sparsity.wgmma.fit_linear_sparse import main
from tests.gpu.sparsity.wgmma.model_fit import choices, described_now, fitted, microseconds, spread

TIMES = Path(__file__).resolve().parents[4] / "reports/data/linear_sparse_times.json"
TRUE = Rates(l2=48.0, memory=12.0, multiply=1.3, begin=5200.0, token=7.0, clock=1.6)


def rows(rates=TRUE, noise=0.0, seed=0):
    """What `--model` would write if times were those of `rates`."""
    random = np.random.default_rng(seed)
    found = []
    for shape in model_times.SHAPES:
        for name in model_times.BITS:
            for variant in model_times.chosen(shape, name):
                row = model_times.described(shape, name, variant)
                us = microseconds(Terms(**row["terms"]), rates) * float(
                    np.exp(noise * random.standard_normal())
                )
                found.append({**row, "us": us, "right": True})
    return json.loads(json.dumps(found))


def test_the_choice_is_among_the_quickest_of_what_an_h200_took():
    """By `RATES`: 3 percent in the mean, 8 at most; and the constants are those that the times give."""
    measured = described_now(json.loads(TIMES.read_text())["rows"])
    made = choices(measured, RATES)
    assert len(made) == 24
    assert sum(one.regret for one in made) / len(made) < 1.03
    assert max(one.regret for one in made) < 1.08
    assert spread(measured, RATES) < 0.11
    again = fitted(measured)
    assert again[:-1] == pytest.approx(RATES[:-1], rel=0.1)


def test_three_variants_of_each_shape_the_choice_first():
    for shape in model_times.SHAPES:
        m, n, k = shape
        for name, bits in model_times.BITS.items():
            found = model_times.chosen(shape, name)
            assert found[0] == choose(m, n, k * bits // 8, bits, False)
            assert len(found) == len(set(found)) <= 3
            assert len({v[:3] for v in found}) > 1
    assert len(list(model_times.jobs(["fp8"]))) >= 2 * len(model_times.SHAPES)


def test_constants_come_back():
    found = fitted(rows())
    assert spread(rows(), RATES) > 0.1
    assert spread(rows(), found) < 0.03
    # The clock is the one of before, so constants are compared by the nanosecond.
    for name, power in (("memory", 1), ("multiply", -1), ("begin", -1)):
        ratio = getattr(found, name) / getattr(TRUE, name) * (found.clock / TRUE.clock) ** power
        assert 0.85 < ratio < 1.18


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_is_not_followed(seed):
    noisy = rows(noise=0.05, seed=seed)
    found = fitted(noisy)
    assert spread(noisy, found) < 0.07
    assert spread(rows(), found) < 0.05


def test_what_no_time_says_anything_of_stays():
    """Rows of one wave that the memory limits know no tensor core."""
    few = [row for row in rows(RATES) if row["shape"][0] == 16]
    assert fitted(few).multiply == pytest.approx(RATES.multiply, rel=0.05)


def test_choices_and_what_they_lose():
    terms = dict(Terms(1, 10, 100.0, 10.0, 10.0, 16)._asdict())
    slow = {"shape": [1, 2, 3], "dtype": "fp8", "name": "a", "terms": terms, "us": 3.0, "right": True}
    quick = {**slow, "name": "b", "terms": {**terms, "panels": 20}, "us": 2.0}
    wrong = {**slow, "name": "c", "us": 1.0, "right": False}
    (found,) = choices([slow, quick, wrong, {**slow, "us": None}], RATES)
    assert (found.name, found.best, found.regret) == ("a", "b", 1.5)
    made = rows()
    assert all(one.regret == 1 for one in choices(made, TRUE))
    with pytest.raises(ValueError, match="5 constants are fitted to at least as many times, got 2"):
        fitted([slow, quick])


def test_a_run_writes_what_is_right_and_says_what_is_wrong(tmp_path, monkeypatch):
    """The reference in place of the kernel, and a clock that stands still; one variant in three is wrong."""
    wrong = model_times.chosen((128, 64, 256), "bf16")[1].name

    def method(cases, variant, *, scaled):
        def call(i):
            one = cases[i]
            scales = {"x_scale": one.x_scale, "scale": one.scale} if scaled else {}
            y = fast.linear_sparse(one.x, one.values, one.metadata, **scales, out_dtype=torch.bfloat16)
            return -y if variant.name == wrong and not scaled else y

        return Method(variant.name, call)

    def prepare(made, count):
        made.replay, made.how = (lambda: None), "graph"

    def times(methods, count, seconds):
        return {one.name: (2.0, 1.0, 3.0) for one in methods if one.replay is not None}

    monkeypatch.setattr(model_times, "case", partial(model_times.case, device="cpu"))
    monkeypatch.setattr(model_times, "SHAPES", ((128, 64, 256),))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for name, function in (("method", method), ("prepare", prepare), ("times", times)):
        monkeypatch.setattr(model_times, name, function)
    said, path = [], tmp_path / "linear_sparse_model.json"
    assert not model_times.measured(said.append, lambda: 60.0, path, ["fp8", "bf16"])
    found = json.loads(path.read_text())["rows"]
    assert [row["right"] for row in found if row["dtype"] == "fp8"] == [True] * 3
    assert [row["right"] for row in found if row["dtype"] == "bf16"] == [True, False, True]
    assert [row.get("us") for row in found] == [2.0] * 4 + [None, 2.0]
    assert any("WRONG by 2.0e+00" in line for line in said)
    assert model_times.measured(said.append, lambda: 1.0, path, ["fp8"])
    assert said[-1].startswith("no time for (128, 64, 256) fp8")


def test_the_script(tmp_path, capsys):
    path = tmp_path / "linear_sparse_model.json"
    path.write_text(json.dumps({"device": "a GPU", "rows": rows(noise=0.02)}))
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a GPU: Rates(l2=")
    assert "before: predictions off by" in said
    assert "fitted: predictions off by 2." in said or "fitted: predictions off by 1." in said
    assert main([]) == 2
