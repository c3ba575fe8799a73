"""`fast.linear`: exact sums bit for bit, others within the bound, the same bits each time, and right in a stream of kernels.

Kernels are compiled for each scheme, length of a row, height of a tile and dtype, so combinations are spread over the schemes:
every scheme has every number of rows, and lengths, dtypes and numbers of columns take turns. See
`tests.support.linear_cases` for the inputs and the bound.

`fast.linear_pair` and `fast.linear_swiglu`: two products of one row in one launch, bit for bit, the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import reference
from ao_lab import Recipe
from ao_lab.config.recipe import integer_scheme, named
from ao_lab.tensor.quantized_tensor import from_quantized
from fast.gemm.choose import choose
from fast.gemm.families import TORCH_DEQUANTIZE, of_stored
from reference import Quantized, Scheme
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, outcome
from tests.support import linear_cases as cases

SCHEMES = (
    "int4_g32", "int4_g64", "int4_g128", "int4_g32_asymmetric", "int4_g64_asymmetric", "int4_g256_asymmetric",
    "int4_g64_asymmetric_bf16", "int4_rowwise", "torchao.int4_g32_tinygemm", "torchao.int4_g64_tinygemm", "int8_rowwise",
    "int8_tensorwise", "int8_rowwise_asymmetric", "int8_g32", "int8_g128_asymmetric", "fp8_rowwise", "fp8_rowwise_e5m2",
    "fp8_tensorwise", "fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4",
    "nvfp4", "nf4", "int2_g32", "int2_g64_asymmetric", "int3_g32", "int3_g128_asymmetric", "int5_g64", "int6_g32_asymmetric",
)  # fmt: skip
ROWS, WIDTHS, LENGTHS = (1, 2, 5, 16, 17, 64, 128), (37, 70, 256), (256, 512, 1536, 4096)
HALVES = (torch.bfloat16, torch.float16)
#: One of each kernel and of its forms, at shapes of a model: many rows, few rows, long rows.
SHIPPED = (("int4_g64_asymmetric", 1, (4096, 4096)), ("int4_g128", 1, (14336, 4096)), ("int4_g32", 1, (1024, 4096)),
           ("torchao.int4_g64_tinygemm", 1, (4096, 14336)), ("int8_rowwise", 1, (14336, 4096)),
           ("int8_rowwise", 1, (1024, 4096)), ("mxfp8_e4m3", 1, (4096, 4096)),
           ("fp8_rowwise", 1, (4096, 14336)), ("nvfp4", 1, (4096, 4096)), ("mxfp4", 1, (4096, 4096)),
           ("int4_g64", 16, (4096, 4096)), ("int8_rowwise", 64, (4096, 4096)), ("mxfp8_e4m3", 32, (4096, 4096)))  # fmt: skip
STREAMED = ("int4_g64_asymmetric", "int8_rowwise", "fp8_rowwise", "mxfp4")
REPETITIONS, DEPENDENT = 100, 200
#: Below this part of the work, a few of the cases at small shapes: for those who try the program itself.
FEW = 0.05


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*linear_jobs(settings), *pair_jobs(settings)]


def linear_jobs(settings: Settings) -> list[Job]:
    """Family "linear"."""
    step = 1 if settings.fraction > FEW else 8
    made = [
        Job("linear", name, "linear", scheme_case, (name, i), 6.0) for i, name in enumerate(SCHEMES[::step])
    ]
    made += [Job("linear", "blocks of eight", "linear", eight_case, (), 2.0)]
    made += [
        Job("linear", f"races {name} {rows} {shape}", "linear", race_case, (name, rows, shape), 3.0)
        for name, rows, shape in SHIPPED[::step]
    ]
    made += [
        Job("linear", f"stream {name}", "linear", stream_case, (name,), 4.0) for name in STREAMED[::step]
    ]
    return [*made, Job("linear", "views and errors", "linear", view_case, (), 2.0)]


def record_of(name: str) -> Scheme:
    """A scheme by any of its names."""
    record = named(name)
    if record is None:
        raise ValueError(f"no scheme {name!r}")
    return record


def scheme_case(run: Run, name: str, index: int) -> None:
    """All numbers of rows; the lengths take turns, one row and one tile have them all."""
    record = record_of(name)
    for number, rows in enumerate(ROWS):
        dtype = HALVES[(number + index) % 2]
        width = WIDTHS[(number + index) % len(WIDTHS)]
        lengths = LENGTHS if rows in (1, 16) else LENGTHS[(number + index) % len(LENGTHS) :][:1]
        for length in lengths if run.settings.fraction > FEW else lengths[:1]:
            compare(run, record, (rows, width, length), dtype, bias=(number + index) % 3 == 0)
    compare(run, record, (1, 70, 1536), torch.float32, bias=True)
    not_a_number(run, record, index)


def compare(run: Run, record: Scheme, sizes: tuple[int, int, int], dtype: torch.dtype, bias: bool) -> None:
    """Exact sums, and random ones."""
    rows, width, length = sizes
    label = f"{record.name} {rows}x{width}x{length} {str(dtype).removeprefix('torch.')}{' bias' * bias}"
    added = cases.integers(-3, 3, (width,), 9).to(dtype) if bias else None
    if not is_fused(run, record, sizes, dtype):
        dequantized(run, record, sizes, dtype, added)
        return
    if record.name != "nf4":
        w, x = cases.exact_weight(record, width, length), cases.exact_inputs(rows, length, dtype)
        run.compare("linear", f"{label} exact", called(run, x, w, added), cases.exact_result(x, w, added))
    w, x = cases.weight(record, width, length), cases.inputs(rows, length, dtype)
    within(run, label, called(run, x, w, added), x, w, added)


def is_fused(run: Run, record: Scheme, sizes: tuple[int, int, int], dtype: torch.dtype) -> bool:
    """Whether a kernel takes a case; the reference takes them all."""
    if run.device.type != "cuda":
        return True
    return (
        next(choose(of_stored(run.put(cases.weight(record, *sizes[1:])), sizes[0], dtype)))
        is not TORCH_DEQUANTIZE
    )


def dequantized(
    run: Run, record: Scheme, sizes: tuple[int, int, int], dtype: torch.dtype, bias: torch.Tensor | None
) -> None:
    """What no kernel takes is torch's product of what `dequantize` gives in the inputs' dtype."""
    w, x, added = run.put((cases.weight(record, *sizes[1:]), cases.inputs(sizes[0], sizes[2], dtype), bias))
    wanted = functional.linear(x, run.fast.dequantize(w, dtype), added)
    run.compare("linear", f"{record.name} {sizes} dequantized", called(run, x, w, added), wanted)


def called(run: Run, x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> Any:
    """What `fast.linear` makes of tensors on the device; twice, since the second call is a replay."""
    placed = run.put((x, w, bias))
    first = run.guarded(lambda: run.fast.linear(*placed))
    again = run.guarded(lambda: run.fast.linear(*placed))
    if not isinstance(first, Failure) and not isinstance(again, Failure):
        run.compare("linear", "called again", again, first)
    return first


def within(run: Run, label: str, got: Any, x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> None:
    """Record how many results are farther from the exact ones than allowed."""
    if isinstance(got, Failure):
        run.record("linear", label, 1, 1, [f"{got.kind}: {got.text}"], status="error")
        return
    bad = cases.outside(got.cpu(), x, w, bias)
    truth, allowed = cases.distance_allowed(x, w, bias)
    worst = float(((got.cpu().double() - truth).abs() / allowed).max()) if bad else 0.0
    run.record("linear", f"{label} bound", got.numel(), bad, [f"{label}: {worst:.3g} times the bound"])


def not_a_number(run: Run, record: Scheme, index: int) -> None:
    """A scale that is NaN makes its row NaN and no other, for one row of inputs and for several."""
    w = cases.weight(record, 70, 512, seed=index)
    if (
        w.scale.dim() != 2
        or w.scale.shape[0] != 70
        or record.scale.storage not in ("float32", "float8_e8m0fnu")
    ):
        return
    w.scale[9, -1] = 255 if w.scale.dtype == torch.uint8 else float("nan")
    for rows in (1, 5):
        got = called(run, cases.inputs(rows, 512, HALVES[index % 2]), w, None)
        wrong = (
            got.isnan().cpu() != (torch.arange(70) == 9) if not isinstance(got, Failure) else torch.ones(1)
        )
        run.record(
            "linear",
            f"{record.name} {rows} NaN scale",
            wrong.numel(),
            int(wrong.sum()),
            ["NaN in other rows"],
        )


def eight_case(run: Run) -> None:
    """Blocks of eight are too short for tiles: a vector by a kernel, rows by what is dequantized."""
    for rows in (1, 3):
        compare(run, integer_scheme(4, 8, True), (rows, 37, 264), torch.bfloat16, bias=True)


def race_case(run: Run, name: str, rows: int, shape: tuple[int, int]) -> None:
    """A launch at a model's shape: within the bound, the same bits a hundred times, and F.linear's."""
    record = record_of(name)
    size = shape if run.settings.fraction > FEW else (37, 512)
    dense = torch.randn(*size, generator=cases.generator(1)).to(run.device)
    w = run.fast.quantize(dense, record, packed=record.format.bits < 8)
    x = cases.inputs(rows, size[1], torch.bfloat16).to(run.device)
    first = run.guarded(lambda: run.fast.linear(x, w))
    if isinstance(first, Failure):
        run.record("linear", name, 1, 1, [f"{first.kind}: {first.text}"], status="error")
        return
    bad = cases.outside(first, x, w, None)
    run.record("linear", "bound", first.numel(), bad, ["farther away than the bound"])
    times = run.settings.few(REPETITIONS, 3)
    differ = sum(not torch.equal(run.fast.linear(x, w), first) for _ in range(times))
    run.record("linear", f"x {times}", times, differ, [f"{differ} of {times} repetitions differ"])
    layer = from_quantized(w, Recipe(weight=record), torch.bfloat16)
    with torch.no_grad():
        made = outcome(lambda: functional.linear(x, layer))
    if run.device.type == "cuda":
        run.compare("linear", "F.linear", made, first)


def stream_case(run: Run, name: str) -> None:
    """Inputs that a kernel writes just before, a graph's replays, and a stream that is still busy."""
    if run.device.type != "cuda":
        run.record("linear", "needs CUDA", 0, 0, [], status="skipped")
        return
    record = record_of(name)
    for width in (4096, 37):
        w = run.put(cases.exact_weight(record, width, 4096))
        inputs = [cases.exact_inputs(1, 4096, torch.bfloat16, seed).to(run.device) for seed in range(8)]
        wanted = torch.stack([cases.exact_result(x, w, None) for x in inputs])
        program = partial(product, run, w)
        for label, ways, right in (
            ("dependent", partial(dependent, run.settings.few(DEPENDENT, 16)), wanted),
            ("graph", replayed, wanted),
            ("side stream", aside, wanted[1]),
        ):
            run.compare("linear", f"{width} {label}", outcome(partial(ways, program, inputs)), right)


def product(run: Run, w: Quantized, x: torch.Tensor) -> Any:
    """The function under test."""
    return run.fast.linear(x, w)


def dependent(times: int, program: Callable[[torch.Tensor], Any], inputs: list[torch.Tensor]) -> torch.Tensor:
    """The product right behind the kernel that writes its input, in a row without a wait; the last of each input's."""
    x, results = torch.zeros_like(inputs[0]), [torch.zeros(0)] * len(inputs)
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    first = [program(given) for given in inputs]
    for step in range(times):
        at = step % len(inputs)
        if step % 3:
            x.copy_(inputs[at])
        else:
            torch.add(inputs[at], 0, out=x)
        results[at] = program(x)
        wrong += (results[at] != first[at]).sum()
    if int(wrong):
        raise RuntimeError(f"{int(wrong)} results are of an input that was overwritten")
    return torch.stack(results)


def replayed(program: Callable[[torch.Tensor], Any], inputs: list[torch.Tensor]) -> torch.Tensor:
    """A graph's result for each input, written by the graph itself."""
    x, source = torch.zeros_like(inputs[0]), inputs[0].clone()
    program(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(source)
        y = program(x)
    results = []
    for given in inputs:
        source.copy_(given)
        graph.replay()
        results.append(y.clone())
    return torch.stack(results)


def aside(program: Callable[[torch.Tensor], Any], inputs: list[torch.Tensor]) -> torch.Tensor:
    """On a stream that is still filling the input."""
    x = inputs[0].clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(inputs[1])
        made = program(x)
    side.synchronize()
    return made


def bias_kinds(run: Run) -> None:
    """One weight with no bias and with biases of each dtype, in turn: every kind has a compiled kernel of its own."""
    for name in ("int4_g64", "int8_rowwise", "mxfp4"):
        w = cases.exact_weight(record_of(name), 37, 512)
        for rows in (1, 6):
            x = cases.exact_inputs(rows, 512, torch.bfloat16)
            placed, inputs = run.put(w), run.put(x)
            for turn, kind in enumerate(2 * (None, torch.float32, torch.bfloat16, torch.float16)):
                bias = None if kind is None else cases.integers(-3, 3, (37,), turn).to(kind)
                added = run.put(bias) if bias is not None else None
                got = run.guarded(
                    lambda inputs=inputs, placed=placed, added=added: run.fast.linear(inputs, placed, added)
                )
                run.compare("linear", f"{name} rows {rows} bias {kind}", got, cases.exact_result(x, w, bias))


def view_case(run: Run) -> None:
    """Views at odd addresses, inputs that are not contiguous, vectors, batches, no rows; errors of the reference."""
    for name in ("int4_g64", "int8_rowwise", "mxfp4", "mxfp6_e3m2"):
        w = cases.exact_weight(record_of(name), 37, 512)
        x = cases.exact_inputs(6, 512, torch.bfloat16)
        placed, inputs, wanted = run.put(w), run.put(x), cases.exact_result(x, w, None)
        memory = torch.zeros(6 * 512 + 1, dtype=x.dtype, device=run.device)[1:].view(6, 512).copy_(inputs)
        codes = torch.zeros(placed.codes.numel() + 1, dtype=torch.uint8, device=run.device)[1:]
        moved = Quantized(**{**vars(placed), "codes": codes.view(placed.codes.shape).copy_(placed.codes)})
        for label, given, weight, rows in (
            ("odd input", memory[:1], placed, wanted[:1]),
            ("odd inputs", memory, placed, wanted),
            ("odd codes", inputs[:1], moved, wanted[:1]),
            ("odd codes, rows", inputs, moved, wanted),
            ("columns", inputs.t().contiguous().t(), placed, wanted),
            ("vector", inputs[2], placed, wanted[2]),
            ("batch", inputs.view(2, 3, 512), placed, wanted.view(2, 3, 37)),
            ("no rows", inputs[:0], placed, wanted[:0]),
        ):
            got = run.guarded(lambda given=given, weight=weight: run.fast.linear(given, weight))
            run.compare("linear", f"{name} {label}", got, rows)
    bias_kinds(run)
    run.same("linear", "another length", x[:, 1:].float().numpy(), w)
    run.same("linear", "another bias", x.float().numpy(), w, x.float().numpy())


NAME, GATED = "linear_pair", "linear_swiglu"
PAIR_SCHEMES = (
    "int4_g32", "int4_g64_asymmetric", "int4_g64_asymmetric_bf16", "torchao.int4_g64_tinygemm", "int8_rowwise", "int8_g128",
    "fp8_rowwise", "fp8_tensorwise", "mxfp8_e4m3",
)  # fmt: skip
#: Parts of a program, one of many, and layers of models.
SHAPES = ((37, 512), (16, 1536), (1024, 4096), (14336, 4096), (4096, 14336))
PAIR_FEW = 0.2


def pair_jobs(settings: Settings) -> list[Job]:
    """Family "pair"."""
    step = 1 if settings.fraction > PAIR_FEW else 2
    both = ((NAME, pair_scheme_case), (GATED, gated_case))
    return [Job("pair", name, of, case, (name,), 4.0) for name in PAIR_SCHEMES[::step] for of, case in both]


def shapes(run: Run) -> tuple[tuple[int, int], ...]:
    """On a CPU, where the reference takes seconds for a layer, none of a model's."""
    return SHAPES if run.device.type == "cuda" else SHAPES[:2]


def pair_scheme_case(run: Run, name: str) -> None:
    """All shapes, both 16-bit dtypes: the two weights hold other numbers."""
    for number, (rows, length) in enumerate(shapes(run)):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        pair = [cases.exact_weight(named(name), rows, length, seed) for seed in (0, 1)]
        x = cases.exact_inputs(1, length, dtype)
        wanted = tuple(cases.exact_result(x, w, None) for w in pair)
        pair_compare(run, NAME, f"{name} {rows}x{length}", x, pair, wanted)


def gated_case(run: Run, name: str) -> None:
    """The same, of inputs that make gates around zero."""
    for number, (rows, length) in enumerate(shapes(run)):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        pair = [cases.exact_weight(named(name), rows, length, seed) for seed in (0, 1)]
        x = cases.exact_inputs(1, length, dtype) / 512
        wanted = reference.swiglu(*(cases.exact_result(x, w, None) for w in pair))
        pair_compare(run, GATED, f"{name} {rows}x{length}", x, pair, wanted)


def pair_compare(
    run: Run, function: str, label: str, x: torch.Tensor, pair: list[Quantized], wanted: Any
) -> None:
    """Called twice, the second time a remembered call; then behind a kernel that makes its inputs, on another stream."""
    placed, weights = run.put(x), [run.put(w) for w in pair]
    product = getattr(run.fast, function)
    first, again = (run.guarded(lambda: product(placed, *weights)) for _ in ("new", "remembered"))
    run.compare(function, label, first, wanted)
    run.compare(function, f"{label} again", again, wanted)
    # Codes at an odd address are copied.
    moved = torch.zeros(weights[0].codes.numel() + 1, dtype=torch.uint8, device=run.device)[1:]
    odd = replace(weights[0], codes=moved.view(weights[0].codes.shape).copy_(weights[0].codes))
    run.compare(function, f"{label} odd", run.guarded(lambda: product(placed, odd, weights[1])), wanted)
    if run.device.type == "cuda" and not isinstance(first, Failure):
        run.compare(function, f"{label} stream", pair_aside(product, placed, weights), wanted)


def pair_aside(product: Callable[..., Any], x: torch.Tensor, weights: list[Quantized]) -> Any:
    """The products of inputs that a kernel in front writes at the last moment."""
    side, held = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(5_000_000)
        held.copy_(x)
        made = product(held, *weights)
    side.synchronize()
    return made
