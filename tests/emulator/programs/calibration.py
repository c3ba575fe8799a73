"""Kernels of calibration on CPU tensors in Triton's interpreter, bit for bit.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process calibration hqq|searched|signround|token_errors
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process calibration columns|candidates [day]

The first compare with `reference.calibration`, the others with the torch operations that kernels stand for; day: few schemes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ao_lab.calibration import judge
from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import gptq
from fast.calibration import hqq as hqq_module
from fast.calibration import search as search_module
from fast.calibration import signround as signround_module
from fast.calibration.hqq import hqq_on_device
from fast.calibration.search import DeviceSearch
from fast.calibration.signround import DeviceRounding, signround_keep, signround_on_device, signround_span
from fast.kernels.calibration import candidates as candidates_kernel
from fast.kernels.calibration import columns as kernel
from fast.kernels.calibration import hqq as hqq_kernel
from fast.kernels.calibration import signround as signround_kernel
from fast.kernels.calibration import token_errors as token_errors_kernel
from fast.quantize.quantize import choose_scales, quantize
from reference import SCHEMES, Scales, Scheme
from reference.arrays.bridges import to_numpy
from reference.arrays.namespace import namespace_of
from reference.calibration import signround as rule
from reference.calibration.hqq import hqq
from reference.calibration.search import Search, has_steps, search_scales
from reference.calibration.signround import SignRoundState
from reference.quantize.blocks import Blocks
from reference.schemes.conventions import hqq_scheme

#: Scheme, dtype of the weights, shape, whether their scales stay.
SIGNROUND_CASES = (
    ("int4_g32_asymmetric", torch.bfloat16, (24, 160), False),
    ("int4_g128", torch.float32, (24, 256), True),
    ("int8_rowwise", torch.float16, (24, 96), False),
    ("mxfp4", torch.float32, (24, 160), False),
    ("nvfp4", torch.bfloat16, (24, 160), False),
    ("nf4", torch.float32, (24, 128), True),
    ("nf4", torch.bfloat16, (24, 128), False),
    ("mxint8", torch.float32, (24, 64), False),
)


def compare_signround() -> None:
    """Compare values, codes, gradients and steps."""
    launches: list[str] = []
    for name in ("moved", "gradient", "step", "keep"):
        setattr(signround_kernel, name, _counting(getattr(signround_kernel, name), name, launches))
    signround_module.has_kernels = lambda x: True
    for name, dtype, shape, stay in SIGNROUND_CASES:
        launches.clear()
        compare_step(name, dtype, shape, stay)
        assert {"moved", "gradient", "step", "keep"} <= set(launches), (name, launches)
        print(name, dtype)


def compare_step(name: str, dtype: torch.dtype, shape: tuple[int, int], stay: bool) -> None:
    """One scheme; a block of zeros, a weight past which its unit leads nowhere finite."""
    rng, scheme = np.random.default_rng(len(name)), SCHEMES[name]
    w = rng.standard_t(4, shape).astype(np.float32) * 0.05
    w[3, :32] = 0
    if dtype == torch.float32:
        w[5, 3] = np.finfo(np.float32).max
    tensor = torch.from_numpy(w).to(dtype)
    factors = Blocks.of(shape, scheme.scale, -1).scale_shape
    v = rng.uniform(-0.5, 0.5, shape).astype(np.float32)
    v[7], v[8] = 0.5, -0.5
    low, high = (rng.uniform(0.5, 1, factors).astype(np.float32) for _ in range(2))
    scales = rule.signround_codes(to_numpy(tensor), v, low, high, scheme).scales if stay else None
    state = SignRoundState(v, None, None) if stay else SignRoundState(v, low, high)
    on_device = SignRoundState(*(None if part is None else torch.from_numpy(part) for part in state))
    given = None if scales is None else signround_module.torch_of(scales)
    span = None if stay or tensor.device.type == "cpu" else signround_span(tensor, scheme)
    found = signround_on_device(tensor, on_device, scheme, given, span=span)
    g = rng.standard_normal(shape).astype(np.float32)
    g[2] = 0
    values, vjp = rule.signround_quantize(to_numpy(tensor), *state, scheme, scales=scales)
    assert_same_bits(found.result().values, values)
    expected, gradients = vjp(g), found.gradients(torch.from_numpy(g))
    stepped = signround_module.signround_step(on_device, gradients, 0.3, range_rate=0.1)
    for ours, theirs in (
        (gradients, expected),
        (stepped, rule.signround_step(state, expected, 0.3, range_rate=0.1)),
    ):
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                assert_same_bits(one, other)
    compare_loop(found, on_device, torch.from_numpy(g))


def compare_loop(found: DeviceRounding, state: SignRoundState, g: torch.Tensor) -> None:
    """A step in one pass is that in two, and a state is kept where it is better, not elsewhere."""
    expected = signround_module.signround_step(state, found.gradients(g), 0.3)
    stepped = found.step(state, g, 0.3)
    kept = SignRoundState(*(None if part is None else part.clone() for part in state))
    for better, wanted in ((False, state), (True, expected)):
        signround_keep(torch.tensor(better), stepped, kept)
        for one, other in zip(kept, wanted, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert_same_bits(one, to_numpy(other))


#: Dtype of outputs, that of those wanted, their shape.
ERROR_CASES = (
    (torch.bfloat16, torch.bfloat16, (2, 3, 96)),
    (torch.float32, torch.bfloat16, (5, 64)),
    (torch.float16, torch.float32, (1, 2, 1)),
)


def compare_token_errors() -> None:
    """Errors within n roundings of a float32 sum of n squares, gradients with the bits of torch's; of parts of outputs."""
    for dtype, other, shape in ERROR_CASES:
        y = torch.randn((*shape[:-1], 2 * shape[-1]))[..., : shape[-1]].to(dtype).requires_grad_()
        wanted, g = torch.randn(shape).to(other), torch.randn(shape[:-1])
        assert token_errors_kernel.is_supported(y, wanted)
        found = token_errors_kernel.token_errors(y, wanted)
        (gradient,) = torch.autograd.grad(found, y, g)
        expected = judge.token_errors(y, wanted)
        assert_same_bits(gradient, to_numpy(torch.autograd.grad(expected, y, g)[0]))
        assert found.dtype == torch.float32
        assert ((found - expected).abs() <= (shape[-1] + 3) * 2.0**-23 * expected).all()
        print(dtype, other, shape)


def _counting(call, name, launches):
    def counted(*arguments, **named):
        launches.append(name)
        return call(*arguments, **named)

    return counted


#: Scheme, dtype of the weights, norm.
SEARCH_CASES = (
    ("int3_g64_asymmetric", torch.bfloat16, 2.0),
    ("int3_g64_asymmetric", torch.float32, 3.0),
    ("mxfp4", torch.bfloat16, 3.0),
)


def compare_searched() -> None:
    """Compare scales and zero points; cubes choose others than squares."""
    search_module.has_kernels = lambda x: True
    launches, of_kernel, scales = [], candidates_kernel.best_candidates, []

    def counted(*given, **named):
        launches.append(1)
        return of_kernel(*given, **named)

    candidates_kernel.best_candidates = counted
    rng = np.random.default_rng(1)
    w = torch.from_numpy(rng.standard_t(4, (8, 128)).astype(np.float32) * 0.05)
    weights = torch.from_numpy(np.exp(rng.standard_normal(128)))
    for name, dtype, norm in SEARCH_CASES:
        x = w.to(dtype)
        found = search_module.search_scales_on_device(x, name, weights=weights, norm=norm)
        expected = search_scales(to_numpy(x), name, weights=weights.numpy(), norm=norm)
        assert_same_bits(found.scale, expected.scale)
        if expected.zero is not None:
            assert_same_bits(found.zero, expected.zero)
        squares = search_scales(to_numpy(x), name, weights=weights.numpy())
        scales.append(bool((expected.scale != squares.scale).any()))
        print(name, dtype, norm)
    assert len(launches) == len(SEARCH_CASES)
    assert scales == [norm == 3 for _, _, norm in SEARCH_CASES]


#: Bits, group, storage, dtype of the weights, options.
HQQ_CASES = (
    (4, 64, "float32", torch.float32, {}),
    (3, 32, "float16", torch.float16, {"p": 0.5, "beta": 100.0}),
    (2, 128, "bfloat16", torch.float32, {"steps": 3}),
    (8, 256, "float32", torch.bfloat16, {"p": 1.0, "beta": 50.0}),
)


def compare_hqq() -> None:
    """Compare zero points and codes; some programs have rows that do not exist.

    Powers go through log2 and exp2 of NumPy here; on these weights their last bit decides nothing.
    """
    hqq_module.has_kernels = lambda x: True
    launches = []
    of_kernel = hqq_kernel.zero_points
    hqq_kernel.zero_points = lambda *given: launches.append(1) or of_kernel(*given)
    for bits, group, storage, dtype, options in HQQ_CASES:
        scheme = hqq_scheme(bits, group, storage)
        w = np.random.default_rng(bits).standard_t(4, (7, 256)).astype(np.float32) * 0.05
        w[3] = 0
        tensor = torch.from_numpy(w).to(dtype)
        found = hqq_on_device(tensor, scheme, **options)
        expected = hqq(to_numpy(tensor), scheme, **options)
        assert_same_bits(found.zero, expected.zero)
        assert_same_bits(found.codes, expected.codes)
        print(scheme.name, storage, dtype)
    assert len(launches) == len(HQQ_CASES)


#: Blocks of so few columns: an interpreted column takes a tenth of a second.
COLUMNS = 16
BY_DAY = ("mxfp4", "int3_g32_asymmetric", "nvfp4")
BY_NIGHT = (
    "int4_g32", "int8_rowwise", "int8_tensorwise", "mxint8", "mxfp6_e2m3", "mxfp8_e5m2", "fp8_128x128", "stretched2_g32",
    "te.nvfp4", "compressed_tensors.nvfp4", "torchao.int4_g32_tinygemm", "torchao.mxfp4_rceil",
    "torchao.fp8_rowwise_training",
)  # fmt: skip


def narrow(scheme: Scheme) -> Scheme:
    """With blocks of four columns, or tiles of two rows by four."""
    block = scheme.scale.block
    if block in (-1, "tensor"):
        return scheme
    size = (2, 4) if isinstance(block, tuple) else 4
    return replace(scheme, name=f"{scheme.name}_narrow", scale=replace(scheme.scale, block=size))


def compare_columns(scheme: Scheme, rows: int, k: int, each: int) -> None:
    """All that a sweep gives, of a matrix with a block and a rest, in another order; each: rows of a warp."""
    rng = np.random.default_rng(rows)
    w = torch.from_numpy(rng.standard_normal((rows, k)).astype(np.float32))
    upper = torch.from_numpy(np.triu(rng.standard_normal((k, k)) / 4, 1) + np.diag(1 + rng.random(k)))
    rule = gptq.ColumnRule.of(scheme, choose_scales(w, scheme), Blocks.of((rows, k), scheme.scale, -1), w)
    picked = torch.arange(rows)[rows % 2 :: 1 + rows % 2]
    sweep = gptq.Sweep.of(w.double(), upper, torch.from_numpy(rng.permutation(k)), picked)
    kernel.rows_of_warp = lambda _: each
    wanted, made = sweep.run(rule), sweep.run(replace(rule, kernel=True))
    for part in ("targets", "change", "loss"):
        assert_same_bits(getattr(made, part), getattr(wanted, part))


def compare_candidates(scheme: Scheme, dtype: torch.dtype, k: int) -> None:
    """The scales of rows whose blocks do not fill the last program."""
    rng = np.random.default_rng(k)
    w = torch.from_numpy(rng.standard_normal((3, k)).astype(np.float32)).to(dtype)
    weights = torch.from_numpy(rng.exponential(size=k))
    blocks, name = Blocks.of((3, k), scheme.scale, -1), str(dtype).removeprefix("torch.")
    tried = (0, -1, 1, 2) if has_steps(scheme) else (1.0, 0.9, 0.7)
    one = DeviceSearch(Search.of(scheme, name, weights.numpy(), tried, 2.0, blocks), weights, name)
    assert one.covered(blocks)
    given = Scales(outer=quantize(w, scheme).outer) if scheme.outer is not None else None
    made, wanted = one.best_by_kernel(namespace_of(w), w, blocks, given), one.best(w, given)
    for part in ("scale", "outer", "zero"):
        if getattr(wanted, part) is not None:
            assert_same_bits(getattr(made, part), getattr(wanted, part))


AGAINST_REFERENCE = {
    "hqq": compare_hqq,
    "searched": compare_searched,
    "signround": compare_signround,
    "token_errors": compare_token_errors,
}


def main(what: str, day: str = "") -> None:
    """See the module text."""
    if what in AGAINST_REFERENCE:
        AGAINST_REFERENCE[what]()
        return
    gptq.BLOCK = kernel.BLOCK = COLUMNS
    for name in BY_DAY if day else (*BY_DAY, *BY_NIGHT):
        scheme = narrow(SCHEMES[name])
        if what == "columns":
            compare_columns(scheme, 5 if day else 6, 20, 2)
            if not day:
                compare_columns(scheme, 5, 20, 1)
        elif isinstance(scheme.scale.block, int) and scheme.scale.block > 0:
            scheme = replace(
                scheme, name=f"{scheme.name}_24", scale=replace(scheme.scale, block=24 if not day else 16)
            )
            compare_candidates(scheme, torch.bfloat16, 48)
            compare_candidates(scheme, torch.float32, 480)
        print(name, flush=True)
