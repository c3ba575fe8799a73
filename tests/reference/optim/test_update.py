"""Steps of Adam, AdamW and Lion: torch's with float32 states, bounded with stored ones; master weights that lose nothing."""

from math import sqrt

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.optim.states import STATES, load_state
from reference.optim.update import Key, Numbers, begin, join_master, power, split_master, update

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def gradients(steps, shape=(4, 512), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(steps)]


@pytest.mark.parametrize(("kind", "optimizer"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_float32_states_are_torchs(kind, optimizer):
    """Within a few roundings of each step: torch orders its operations otherwise."""
    stored = begin(gradients(1)[0], STATES["float32"])
    p = torch.nn.Parameter(torch.from_numpy(stored.p.copy()))
    torchs = optimizer([p], **OPTIONS)
    for step, g in enumerate(gradients(30, seed=1), 1):
        stored = update(stored, g, STATES["float32"], step=step, kind=kind, **OPTIONS)
        p.grad = torch.from_numpy(g)
        torchs.step()
    assert np.abs(stored.p - p.detach().numpy()).max() <= 30 * 2**-22


def test_lion_is_its_program():
    p, m = 0.5, 0.0
    stored = begin(np.full((1, 256), p, np.float32), STATES["float32"], "lion")
    for step, g in enumerate([0.3, -2.0, 0.1], 1):
        stored = update(stored, np.full((1, 256), g, np.float32), STATES["float32"], step=step, kind="lion", betas=(0.9, 0.99),
                        **OPTIONS)  # fmt: skip
        p = p - OPTIONS["lr"] * (np.sign(0.9 * m + 0.1 * g) + OPTIONS["weight_decay"] * p)
        m = 0.99 * m + 0.01 * g
    assert np.allclose(stored.p, p, rtol=1e-6)
    assert np.allclose(stored.first, m, rtol=1e-6)


def test_powers_are_products_of_squares():
    assert power(0.999, 5) == 0.999 * ((0.999 * 0.999) * (0.999 * 0.999))
    assert power(0.9, 0) == 1.0
    assert abs(power(0.999, 1_000_003) - 0.999**1_000_003) == 0.0


def updates(states, ratio, steps, stops=None, seed=0, blocks=4):
    """Largest |dp| / lr of the last steps, and that with float32 states: one gradient in 256 is `ratio` times larger."""
    size = np.full((blocks, 256), 1 / ratio, np.float32)
    size[:, 0] = 1
    zeros = np.zeros(size.shape, np.float32)
    ours, exact = begin(zeros, states), begin(zeros, STATES["float32"])
    found = [0.0, 0.0]
    for step, g in enumerate(gradients(steps, size.shape, seed), 1):
        g = g * size
        if stops is not None and step > stops:
            g[size < 1] = 0
        after = (
            update(ours, g, states, step=step, lr=1.0, key=Key(seed)),
            update(exact, g, STATES["float32"], step=step, lr=1.0),
        )
        if step > 10:
            found = [
                max(f, float(np.abs(a.p - b.p).max()))
                for f, a, b in zip(found, after, (ours, exact), strict=True)
            ]
        ours, exact = after
    return found


@given(st.floats(0, 5), st.integers(0, 2**16), st.booleans(), st.sampled_from(["8bit", "4bit"]))
@settings(max_examples=12)
def test_updates_are_at_most_three_times_those_of_float32(exponent, seed, stops, name):
    """Whatever the ratio of gradients in a block from 1 to 10^5, and where the small ones stop."""
    largest, exact = updates(STATES[name], 10.0**exponent, 60, 40 if stops else None, seed, 1)
    assert largest <= 3 * exact


@pytest.mark.parametrize("name", ["torchao.8bit", "torchao.fp8"])
def test_those_of_other_libraries_are_hundreds_of_times_larger(name):
    largest, exact = updates(STATES[name], 1e3, 60, 40)
    assert largest > 100 * exact


def test_stochastic_rounding_keeps_the_mean_of_second_moments():
    """After 300 steps roots are those of float32 but for half their variance, as squares of what was rounded without bias are
    too large by all of it; rounding to nearest stays where it began."""
    size = np.full((8, 256), 1e-2, np.float32)
    zeros = np.zeros(size.shape, np.float32)
    ours, exact = begin(zeros, STATES["8bit"]), begin(zeros, STATES["float32"])
    for step, g in enumerate(gradients(300, size.shape), 1):
        ours = update(ours, g * size, STATES["8bit"], step=step, lr=0.0)
        exact = update(exact, g * size, STATES["float32"], step=step, lr=0.0)
    root = np.sqrt(load_state(ours.second, STATES["8bit"].second) / exact.second)
    assert abs(root.mean() - 1) < 5 * root.std() / sqrt(root.size) + root.var() / 2
    assert root.std() < 0.15


@pytest.mark.parametrize("width", [8, 16])
def test_master_weights_come_back(width):
    """16 bits: the float32 itself; 8: it rounded to 24 bits, and that comes back as it is. The bfloat16 is the nearest."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 14, np.uint32)
    p = bits.view(np.float32)
    p = p[np.isfinite(p)]
    high, error = split_master(p, width)
    joined = join_master(high, error)
    if width == 16:
        assert np.array_equal(joined.view(np.uint32), p.view(np.uint32))
        ties = (p.view(np.uint32) & 0xFFFF) == 0x8000
        assert np.array_equal(
            high[~ties].view(np.uint16), p.astype(ml_dtypes.bfloat16)[~ties].view(np.uint16)
        )
    again = split_master(joined, width)
    assert np.array_equal(again[0].view(np.uint16), high.view(np.uint16))
    assert np.array_equal(again[1], error)
    difference = np.abs(joined.view(np.int32).astype(np.int64) - p.view(np.int32))
    assert difference.max() <= (128 if width == 8 else 0)


def test_a_constant_gradient_is_reached():
    """The mean of the first moment, within 5 standard errors of a step of 1/8; rounded to nearest it would stop at 0.75."""
    g = np.ones((16, 256), np.float32)
    stored = begin(g, STATES["8bit"])
    for step in range(1, 80):
        stored = update(stored, g, STATES["8bit"], step=step, lr=0.0)
    m = load_state(stored.first, STATES["8bit"].first)
    assert abs(m.mean() - 1) <= 5 / 8 / sqrt(m.size) + 0.9**79


def test_master_weights_of_infinity_and_nan():
    high, error = split_master(np.array([np.inf, -np.inf, np.nan, 3.4e38, 0.0, -0.0], np.float32), 8)
    assert high.view(np.uint16).tolist() == [0x7F80, 0xFF80, 0x7FC0, 0x7F80, 0, 0x8000]
    assert np.isfinite(join_master(high, error)[3:]).all()


@pytest.mark.parametrize(("kind", "moves"), [("nearest", False), ("stochastic", True), ("24bit", True)])
def test_small_updates_are_not_lost(kind, moves):
    """lr 1e-5 at p = 1, a last place of 2^-8: rounding to nearest never moves p; stochastic rounding and a master weight go the
    way of float32."""
    p = np.ones((1, 4096), np.float32).astype(ml_dtypes.bfloat16)
    g = np.ones(p.shape, np.float32)
    states, steps = STATES["float32"], 100
    stored = begin(p, states, master="24bit" if kind == "24bit" else "none")
    for step in range(1, steps + 1):
        stored = update(
            stored, g, states, step=step, lr=1e-5, stochastic_round=kind == "stochastic", key=Key(3)
        )
    now = stored.p.astype(np.float32) if stored.error is None else join_master(stored.p, stored.error)
    moved = 1 - float(now.mean())
    if not moves:
        assert moved == 0
    # Each of 4096 elements takes a step of 2^-8 (below 1) or none, with the mean of the exact sum; 24 bits 2^-17 a step.
    bound = 5 * sqrt(steps * 1e-5 * 2**-8 / 4096) if kind == "stochastic" else steps * 2**-17
    assert not moves or abs(moved - steps * 1e-5) <= bound


def test_finite_input_stays_finite():
    g = np.array([[3e38, -3e38, 1e-45, 0, 1e20, 1.0, -1e-30, 2e19] * 32], np.float32)
    for name in ("8bit", "4bit", "float32"):
        stored = begin(np.ones(g.shape, np.float32), STATES[name])
        for step in range(1, 6):
            stored = update(stored, g if step % 2 else np.zeros_like(g), STATES[name], step=step, lr=0.1)
        assert np.isfinite(stored.p).all()


def test_a_shard_draws_what_the_whole_draws():
    g, p = gradients(1, (8, 512))[0], gradients(1, (8, 512), 3)[0]
    whole = update(begin(p, STATES["8bit"]), g, STATES["8bit"], step=1, lr=0.1)
    part = update(begin(p[4:], STATES["8bit"]), g[4:], STATES["8bit"], step=1, lr=0.1, key=Key(first=8))
    assert np.array_equal(whole.second.codes[4:], part.second.codes)


def test_numbers_are_rounded_once():
    n = Numbers.of("adamw", 3, 1e-3, (0.9, 0.999), 1e-8, 0.1)
    assert n.size == np.float32(float(np.float32(1e-3)) / (1 - 0.9 * (0.9 * 0.9)))
    assert n.second_rest == np.float32(1.0 - 0.999)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"lr": -1.0}, "lr is a finite number"), ({"eps": 0.0}, "with 0 a parameter whose gradients are 0 becomes NaN"),
     ({"betas": (0.9, 1.0)}, r"betas\[1\] = 1.0"), ({"kind": "sgd"}, "optimizer"),
     ({"weight_decay": float("nan")}, "weight_decay")],
)  # fmt: skip
def test_refusals(change, said):
    g = gradients(1)[0]
    with pytest.raises(ValueError, match=said):
        update(begin(g, STATES["8bit"]), g, STATES["8bit"], step=1, **{"lr": 0.1, **change})


def test_a_gradient_of_another_shape():
    with pytest.raises(ValueError, match="a gradient has its parameter's shape"):
        update(
            begin(gradients(1)[0], STATES["8bit"]),
            np.zeros((1, 4), np.float32),
            STATES["8bit"],
            step=1,
            lr=0.1,
        )
