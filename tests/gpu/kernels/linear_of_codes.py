"""`fast.linear_of_codes`, and layers of one row that it computes: exact sums bit for bit, others inside the bound of float32,
the same bits each time, those of several rows, and right in a stream of kernels. Several rows: exact sums bit for bit in every
tile, and others of floats with the bits of the tensor core's model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import reference
from ao_lab import Recipe
from ao_lab.tensor.quantized_tensor import from_quantized
from reference import SCHEMES, Quantized, Scales
from reference.matmul.linear import transposed
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, outcome
from tests.gpu.kernels.linear import DEPENDENT, FEW, REPETITIONS, aside, dependent, replayed
from tests.support import linear_cases as cases

NAME = "linear_of_codes"
PAIRS = (
    ("int8_rowwise", "int8_rowwise"), ("int8_tensorwise", "int8_tensorwise"), ("int8_rowwise_asymmetric", "int8_rowwise"),
    ("int8_rowwise", "int8_tensorwise"), ("fp8_rowwise", "fp8_rowwise"), ("fp8_tensorwise", "fp8_tensorwise"),
    ("fp8_rowwise_e5m2", "fp8_rowwise"), ("fp8_rowwise", "fp8_rowwise_e5m2"), ("fp8_tensorwise_e5m2", "fp8_rowwise_e5m2"),
)  # fmt: skip
#: One warp and eight, whole steps and parts of one, rows that are no multiple of a program's.
SHAPES = ((37, 512), (1, 16), (5, 528), (70, 2768), (256, 4096), (1023, 11008), (14341, 1024))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Layers of models.
SHIPPED = ((14336, 4096), (4096, 14336), (1024, 4096), (4096, 11008), (2048, 28672))
#: Inputs under scales that are given, and weights (N, K) of layers: other N than multiples of 8 a GPU multiplies dequantized.
STATIC_SHAPES = ((40, 528), (1000, 1040), (4096, 14336), (72, 2768), (2048, 4112))
STATIC = ("int8_tensorwise", "torchao.int8_tensorwise_asymmetric")
ELEMENTS = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


#: Rows that fill a tile, and those that do not; weights that fill none, and one whose K is split.
ROWS = (2, 3, 16, 17, 33, 64, 65, 100, 128, 200, 512)
TILED = ((37, 528), (1000, 1040), (4096, 14336), (70, 2768), (2048, 4112))


def jobs(settings: Settings) -> list[Job]:
    """Family "codes"."""
    step = 1 if settings.fraction > FEW else 8
    made = [
        Job("codes", " x ".join(pair), NAME, pair_case, (*pair, i), 4.0)
        for i, pair in enumerate(PAIRS[::step])
    ]
    made += [
        Job("codes", f"layer {name} {shape}", NAME, layer_case, (name, shape), 3.0)
        for name in ("int8_rowwise", "fp8_rowwise", "fp8_tensorwise")
        for shape in SHIPPED[::step]
    ]
    made += [
        Job("codes", f"stream {name}", NAME, stream_case, (name,), 3.0)
        for name in ("int8_rowwise", "fp8_rowwise")
    ]
    made += [
        Job("codes", f"rows {pair[0]} x {pair[1]}", NAME, rows_case, (*pair, i), 6.0)
        for i, pair in enumerate(PAIRS[::step])
    ]
    made += [Job("codes", f"static {name}", NAME, static_case, (name,), 6.0) for name in STATIC[::step]]
    made.append(Job("codes", "rows of the model", NAME, model_case, (), 3.0))
    return [*made, Job("codes", "views", NAME, view_case, (), 2.0)]


def drawn(name: str, shape: tuple[int, int], most: int, seed: int) -> Quantized:
    """Integers from -most to most as codes, scales that are none of them powers of two, zero points of all sizes."""
    q = reference.quantize(torch.zeros(shape), name)
    codes = cases.integers(-most, most, shape, seed).to(ELEMENTS[q.scheme.element]).view(torch.uint8)
    scale = torch.rand(q.scale.shape, generator=cases.generator(seed + 1)) * 0.01 + 0.001
    zero = None if q.zero is None else cases.integers(-128, 127, tuple(q.zero.shape), seed).to(torch.int8)
    return replace(q, codes=codes, scale=scale, zero=zero)


def specified(x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The product where sums are exact: then the scales and the bias, each rounded to float32."""
    left, right = (q.codes.view(ELEMENTS[q.scheme.element]).double() for q in (x, w))
    sums = (left if x.zero is None else left - x.zero) @ right.t()
    made = sums.to(torch.float32) * x.scale * (w.scale if w.scale.dim() == 0 else w.scale.t())
    return (made if bias is None else made + bias.to(torch.float32)).to(dtype)


def pair_case(run: Run, inputs: str, weight: str, index: int) -> None:
    """All shapes; dtypes, biases and their dtypes take turns."""
    most = 127 if inputs.startswith("int8") else 8
    for number, shape in enumerate(SHAPES if run.settings.fraction > FEW else SHAPES[:3]):
        dtype, bias = DTYPES[(number + index) % 3], None
        if (number + index) % 2:
            bias = torch.randn(shape[0], generator=cases.generator(number)).to(DTYPES[number % 3])
        x, w = drawn(inputs, (1, shape[1]), most, number), drawn(weight, shape, most, number + 50)
        label = f"{shape} {str(dtype).removeprefix('torch.')}{' bias' * (bias is not None)}"
        run.compare(NAME, label, called(run, x, w, bias, dtype), specified(x, w, bias, dtype))
    random_case(run, inputs, weight)


def random_case(run: Run, inputs: str, weight: str) -> None:
    """Numbers with all their digits: integers as the reference, floats inside its bound."""
    x = reference.quantize(cases.inputs(1, 2768, torch.float32), inputs)
    w = reference.quantize(cases.inputs(70, 2768, torch.float32, 3), weight)
    bias = cases.inputs(1, 70, torch.float32, 4)[0]
    got = called(run, x, w, bias, torch.float32)
    options: dict[str, Any] = {"accumulation": "blocked", "block": 2768, "bias": bias}
    if inputs.startswith("int8") or isinstance(got, Failure):
        run.compare(NAME, "random", got, reference.linear(x, w, out_dtype="float32", **options))
        return
    exact = reference.dequantize(x).double() @ reference.dequantize(w).double().t() + bias.double()
    bound = reference.matmul_error_bound(x, transposed(w), **options)
    bad = int((~((got.cpu().double() - exact).abs() <= bound + 2.0**-40)).sum())
    run.record(NAME, "bound", got.numel(), bad, ["farther away than the bound"])


def rows_case(run: Run, inputs: str, weight: str, index: int) -> None:
    """Sums that are exact, of floats those that 14 bits hold, in all tiles; a hundred times, as tiles are read ahead."""
    few, integers = run.settings.fraction <= FEW, inputs.startswith("int8")
    most = 127 if integers else 2
    for number, (n, k) in enumerate(TILED[:2] if few else TILED):
        w = drawn(weight, (n, k), most, number)
        for rows in ROWS[:4] if few else ROWS:
            dtype, bias = DTYPES[(rows + index) % 3], None
            if (rows + index) % 2:
                bias = torch.randn(n, generator=cases.generator(rows)).to(DTYPES[number % 3])
            x = drawn(inputs, (rows, k), most, rows + 50)
            wanted = specified(x, w, bias, dtype)
            for fast_sums in (False,) if integers else (False, True):
                label = f"{rows} rows {(n, k)}{' fast' * fast_sums}"
                run.compare(NAME, label, called(run, x, w, bias, dtype, fast_sums), wanted)
    repeated(run, inputs, weight)


def repeated(run: Run, inputs: str, weight: str) -> None:
    """One product after the other into memory of the one before."""
    shape = (1024, 4096) if run.settings.fraction > FEW else (48, 512)
    placed = run.put((drawn(inputs, (24, shape[1]), 2, 1), drawn(weight, shape, 2, 2)))
    made = run.guarded(lambda: run.fast.linear_of_codes(*placed, dtype=torch.bfloat16))
    if isinstance(made, Failure):
        run.record(NAME, "repeated", 1, 1, [f"{made.kind}: {made.text}"], status="error")
        return
    times = run.settings.few(REPETITIONS, 3)
    differ = sum(
        not torch.equal(run.fast.linear_of_codes(*placed, dtype=torch.bfloat16), made) for _ in range(times)
    )
    run.record(NAME, f"rows x {times}", times, differ, [f"{differ} of {times} repetitions differ"])


def model_case(run: Run) -> None:
    """Numbers with all their digits: inside the bound, and where the device has a Hopper's tensor core its model's bits."""
    x = reference.quantize(cases.inputs(24, 1040, torch.float32), "fp8_rowwise")
    w = reference.quantize(cases.inputs(40, 1040, torch.float32, 3), "fp8_rowwise")
    exact = reference.dequantize(x).double() @ reference.dequantize(w).double().t()
    for fast_sums, promote in ((False, 128), (True, None)):
        got = called(run, x, w, None, torch.float32, fast_sums)
        if isinstance(got, Failure):
            run.record(NAME, "model", 1, 1, [f"{got.kind}: {got.text}"], status="error")
            continue
        options: dict[str, Any] = {"accumulation": "hopper_fp8", "promote": promote}
        bound = reference.matmul_error_bound(x, transposed(w), **options)
        bad = int((~((got.cpu().double() - exact).abs() <= bound)).sum())
        run.record(NAME, f"bound promote={promote}", got.numel(), bad, ["farther away than the bound"])
        if run.device.type == "cuda" and torch.cuda.get_device_capability(run.device) == (9, 0):
            run.compare(NAME, f"promote={promote}", got, reference.matmul(x, transposed(w), **options))


def called(
    run: Run,
    x: Quantized,
    w: Quantized,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast_sums: bool = False,
) -> Any:
    """What the function makes of tensors on the device; twice, since the second call is a replay."""
    placed = run.put((x, w, bias))
    options = {"dtype": dtype, "fast_sums": fast_sums} if fast_sums else {"dtype": dtype}
    first, again = (run.guarded(lambda: run.fast.linear_of_codes(*placed, **options)) for _ in range(2))
    if not isinstance(first, Failure) and not isinstance(again, Failure):
        run.compare(NAME, "called again", again, first)
    return first


def layer_of(run: Run, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """A weight whose inputs are quantized as it is."""
    dense = torch.randn(*shape, generator=cases.generator(1)).to(run.device)
    recipe = Recipe(weight=SCHEMES[name], activation=SCHEMES[name])
    return from_quantized(run.fast.quantize(dense, name), recipe, torch.bfloat16)


def layer_case(run: Run, name: str, shape: tuple[int, int]) -> None:
    """A layer of one row: the function of its codes, the same bits a hundred times and compiled; integers as of 20 rows."""
    layer = layer_of(run, name, shape if run.settings.fraction > FEW else (48, 512))
    x = cases.inputs(1, layer.shape[1], torch.bfloat16).to(run.device)
    with torch.no_grad():
        first = outcome(lambda: functional.linear(x, layer))
        if isinstance(first, Failure):
            run.record(NAME, name, 1, 1, [f"{first.kind}: {first.text}"], status="error")
            return
        times = run.settings.few(REPETITIONS, 3)
        differ = sum(not torch.equal(functional.linear(x, layer), first) for _ in range(times))
        run.record(NAME, f"x {times}", times, differ, [f"{differ} of {times} repetitions differ"])
        program = torch.compile(lambda x: functional.linear(x, layer), fullgraph=True, backend="aot_eager")
        run.compare(NAME, "compiled", outcome(lambda: program(x)), first)
        several = functional.linear(x.expand(20, -1).contiguous(), layer)
    if name.startswith("int8"):
        run.compare(NAME, "of 20 rows", several[7:8], first)
    if run.device.type == "cuda":
        codes = run.fast.quantize(x, name)
        made = run.fast.linear_of_codes(codes, layer.quantized, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        run.compare(NAME, "F.linear", first, made)


def static_case(run: Run, name: str) -> None:
    """Layers under static scales, with rows that hold a NaN: the bits of a CPU, three times, in a graph too."""
    zero = None if SCHEMES[name].zero is None else torch.tensor(-9, dtype=torch.int8)
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES[name])
    given = Scales(torch.tensor(0.02), None, zero)
    for number, (width, length) in enumerate(
        STATIC_SHAPES if run.settings.fraction > FEW else STATIC_SHAPES[:1]
    ):
        dense = torch.randn(width, length, generator=cases.generator(number))
        host = from_quantized(run.fast.quantize(dense, "int8_rowwise"), recipe, torch.bfloat16, given)
        layer = host.to(run.device)
        for rows in (1, *ROWS) if run.settings.fraction > FEW else (1, 5):
            x = cases.inputs(rows, length, torch.bfloat16, rows)
            x[rows // 2, rows % length] = float("nan")
            wanted, x = one_nan(functional.linear(x, host)), x.to(run.device)
            for time in range(3):  # the ordinary way, then prepared
                got = outcome(lambda x=x, layer=layer: one_nan(functional.linear(x, layer)))
                run.compare(NAME, f"static {rows} {width} {length} {time}", got, wanted)
            if run.device.type == "cuda":
                got = outcome(lambda x=x, layer=layer: one_nan(replayed(partial(product, layer), [x])[0]))
                run.compare(NAME, f"static {rows} {width} {length} graph", got, wanted)


def one_nan(y: torch.Tensor) -> torch.Tensor:
    """The same numbers, each NaN as one: conversions to 16 bits write several, by the processor and its vectors."""
    return torch.where(y.isnan(), torch.full_like(y, float("nan")), y)


def stream_case(run: Run, name: str) -> None:
    """Behind the kernel that quantizes its input, in a graph, and on a stream that is still busy."""
    if run.device.type != "cuda":
        run.record(NAME, "needs CUDA", 0, 0, [], status="skipped")
        return
    for width in (4096, 37 * 16):
        layer = layer_of(run, name, (width, 4096))
        inputs = [cases.inputs(1, 4096, torch.bfloat16, seed).to(run.device) for seed in range(8)]
        with torch.no_grad():
            wanted = torch.stack([functional.linear(x, layer) for x in inputs])
            torch.cuda.synchronize()
            program = partial(product, layer)
            for label, ways, right in (
                ("dependent", partial(dependent, run.settings.few(DEPENDENT, 16)), wanted),
                ("graph", replayed, wanted),
                ("side stream", aside, wanted[1]),
            ):
                run.compare(NAME, f"{width} {label}", outcome(partial(ways, program, inputs)), right)


def product(layer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A layer."""
    return functional.linear(x, layer)


def view_case(run: Run) -> None:
    """Codes at odd addresses and in columns."""
    for name in ("int8_rowwise", "fp8_rowwise"):
        x, w = (drawn(name, shape, 8, 3) for shape in ((1, 528), (37, 528)))
        wanted = specified(x, w, None, torch.bfloat16)
        left, right = run.put((x, w))
        for label, given in (
            ("odd inputs", (moved(left), right)),
            ("odd weight", (left, moved(right))),
            ("columns", (left, replace(right, codes=right.codes.t().contiguous().t()))),
        ):
            got = run.guarded(lambda given=given: run.fast.linear_of_codes(*given, dtype=torch.bfloat16))
            run.compare(NAME, f"{name} {label}", got, wanted)


def moved(q: Quantized) -> Quantized:
    """The same codes, beginning at an odd address."""
    memory = torch.zeros(q.codes.numel() + 1, dtype=torch.uint8, device=q.codes.device)
    return replace(q, codes=memory[1:].view(q.codes.shape).copy_(q.codes))
