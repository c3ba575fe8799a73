"""Functions of `fast` as parts of torch: compiled, captured, on other streams, with autograd, on fake tensors.

The same input a hundred times, into memory that holds another byte each time: every output identical, and right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from reference import SCHEMES, Scales
from tests.gpu.harness.inputs import NUMPY, REPRESENTATIVE, normals
from tests.gpu.harness.poison import fill_freed
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, outcome, tensors

TORCH_SCHEMES = ("mxfp8_e4m3", "fp8_rowwise", "nvfp4", "int4_g32_asymmetric", "fp8_tensorwise")
BACKENDS = ("inductor", "aot_eager")
SHAPE = (64, 256)
PARTS = ("codes", "scale", "outer", "zero")


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*torch_jobs(settings), *race_jobs(settings)]


def torch_jobs(settings: Settings) -> list[Job]:
    """Families "compile", "graph", "stream", "autograd", "fake" and "ops"."""
    names = TORCH_SCHEMES if settings.fraction > 0.2 else TORCH_SCHEMES[::3]
    made = [
        Job("compile", f"{backend} {name}", "quantize", compile_case, (name, backend), 15.0)
        for name in names
        for backend in (BACKENDS if settings.fraction > 0.2 else BACKENDS[1:])
    ]
    for family, case in (("graph", graph_case), ("stream", stream_case), ("autograd", autograd_case),
                         ("fake", fake_case), ("ops", ops_case)):  # fmt: skip
        made += [Job(family, name, "quantize", case, (name,), 5.0) for name in names]
    return made


def parts(q: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a Quantized, which any program can return."""
    return tuple(value for value in (getattr(q, name) for name in PARTS) if value is not None)


def functions(run: Run, name: str) -> dict[str, Callable[[torch.Tensor], Any]]:
    """One program for each public function, that a user could write."""
    fast = run.fast
    return {
        "quantize": lambda x: parts(fast.quantize(x * 2, name)),
        "dequantize": lambda x: fast.dequantize(fast.quantize(x, name), torch.bfloat16) + 1,
        "fake_quantize": lambda x: fast.fake_quantize(x, name) * 2,
    }


def compile_case(run: Run, name: str, backend: str) -> None:
    """fullgraph programs give the bits of the same program run eagerly, for two shapes and with a gradient."""
    for function, program in functions(run, name).items():
        torch._dynamo.reset()
        compiled = torch.compile(program, fullgraph=True, backend=backend)
        for shape in (SHAPE, (96, 512)):
            x = run.put(normals(shape, seed=1))
            run.compare(
                function,
                f"{shape}",
                outcome(lambda c=compiled, x=x: c(x)),
                outcome(lambda p=program, x=x: p(x)),
            )
    torch._dynamo.reset()
    program = functions(run, name)["fake_quantize"]
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    run.compare("fake_quantize_vjp", "compiled gradient", gradient(run, compiled), gradient(run, program))


def gradient(run: Run, program: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """d/dx of the weighted sum of a program's output."""

    def work() -> Any:
        x = run.put(normals(SHAPE, seed=2)).requires_grad_()
        (program(x) * run.put(normals(SHAPE, seed=3))).sum().backward()
        return x.grad

    return outcome(work)


def without_cuda(run: Run, function: str) -> bool:
    """Whether a case that needs CUDA is skipped, which is recorded."""
    if run.device.type == "cuda":
        return False
    run.record(function, "needs CUDA", 0, 0, [], status="skipped")
    return True


def graph_case(run: Run, name: str) -> None:
    """A CUDA graph that quantizes new contents of its input at every replay."""
    if without_cuda(run, "quantize"):
        return
    for function, program in functions(run, name).items():
        got = outcome(lambda p=program: captured(run, p))
        wanted = tuple(program(run.put(normals(SHAPE, seed=seed))) for seed in (5, 6))
        if isinstance(got, Failure):
            run.alive(got)
        run.compare(function, "replayed", got, wanted)


def captured(run: Run, program: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
    """Results of two replays with different inputs."""
    x = run.put(normals(SHAPE, seed=4))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            program(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = program(x)
    results = []
    for seed in (5, 6):
        x.copy_(run.put(normals(SHAPE, seed=seed)))
        graph.replay()
        torch.cuda.synchronize()
        results.append(tuple(t.clone() for t in out) if isinstance(out, tuple) else out.clone())
    return tuple(results)


def stream_case(run: Run, name: str) -> None:
    """On a side stream that is still busy filling the input: a kernel on another stream would read old values."""
    if without_cuda(run, "quantize"):
        return
    for function, program in functions(run, name).items():
        program(run.put(normals(SHAPE)))
        fresh, x = run.put(normals(SHAPE, seed=7)), run.put(normals(SHAPE, seed=8))
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            x.copy_(fresh)
            got = outcome(lambda p=program, x=x: p(x))
        side.synchronize()
        run.compare(function, "side stream", got, outcome(lambda p=program, f=fresh: p(f)))


def autograd_case(run: Run, name: str) -> None:
    """Gradients of fake_quantize are those of the reference, for x and for given float32 scales."""
    x, g = normals(SHAPE, seed=1) * 3, normals(SHAPE, seed=2)
    scales = run.expect("choose_scales", normals(SHAPE, seed=1), name)
    dx, _, _ = run.expect("fake_quantize_vjp", g, x, name)
    run.compare("fake_quantize_vjp", "x", outcome(lambda: grads(run, x, g, name, None)), (dx,))
    transposed = np.ascontiguousarray(g.T).T
    run.compare(
        "fake_quantize_vjp", "strided g", outcome(lambda: grads(run, x, transposed, name, None)), (dx,)
    )
    learned = run.expect("fake_quantize_vjp", g, x, name, scales=scales)
    wanted = (learned[0], learned[1]) if scales.scale.dtype == np.float32 else (learned[0],)
    got = outcome(lambda: grads(run, x, g, name, scales))
    run.compare("fake_quantize_vjp", "scales", got, wanted)
    detached = outcome(lambda: run.fast.quantize(run.put(x).requires_grad_(), name))
    run.compare("quantize", "of a tensor with gradient", detached, run.expect("quantize", x, name))
    needs = [t.requires_grad for t in tensors(detached)]
    run.record("quantize", "codes without gradient", 1, int(any(needs)), [f"requires_grad {needs}"])


def grads(run: Run, x: Any, g: Any, name: str, scales: Any) -> tuple[torch.Tensor, ...]:
    """(dx, dscale if the scale is float32 and given) by autograd; g keeps its strides."""
    leaves = [run.put(x).requires_grad_()]
    given = None
    if scales is not None:
        placed = run.put(scales)
        learned = placed.scale.dtype == torch.float32
        scale = placed.scale.requires_grad_() if learned else placed.scale
        leaves += [scale] if learned else []
        given = Scales(scale, placed.outer, placed.zero)
    y = run.fast.fake_quantize(leaves[0], name, scales=given)
    y.backward(torch.from_numpy(g).to(run.device))
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


def fake_case(run: Run, name: str) -> None:
    """Fake and meta tensors give tensors of the right shapes and dtypes without computing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = {
        key: described(outcome(lambda p=p: p(run.put(normals(SHAPE)))))
        for key, p in functions(run, name).items()
    }
    for key, program in functions(run, name).items():
        with FakeTensorMode():
            x = torch.empty(SHAPE, device=run.device)
            fake = described(outcome(lambda p=program, x=x: p(x)))
        meta = described(outcome(lambda p=program: p(torch.empty(SHAPE, device="meta"))))
        for label, got in (("fake", fake), ("meta", meta)):
            good = got == real[key]
            run.record(key, label, 1, int(not good), [f"{label}: got {got}, expected {real[key]}"])


def described(value: Any) -> Any:
    """Shapes, dtypes and strides of a result."""
    if isinstance(value, Failure):
        return value
    return [
        (tuple(t.shape), str(t.dtype), t.stride()) for t in (value if isinstance(value, tuple) else (value,))
    ]


class Calls(TorchDispatchMode):
    """Keeps every call of an operator of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ao_lab":
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def ops_case(run: Run, name: str) -> None:
    """torch.library.opcheck of every registered operator that the programs call, with the arguments they gave it."""
    calls = Calls()
    with calls:
        for program in functions(run, name).values():
            outcome(lambda p=program: p(run.put(normals(SHAPE))))
    if not calls.seen:
        run.record("quantize", "no operators are registered", 0, 0, [], status="skipped")
    for op, args, keywords in calls.seen:
        got = outcome(lambda o=op, a=args, k=keywords: set(torch.library.opcheck(o, a, k).values()))
        run.record("quantize", f"{op}", 1, int(got != {"SUCCESS"}), [f"{op}: {str(got)[:500]}"])


REPETITIONS = 100
RACE_SHAPE = (1024, 1024)
#: Functions of quantized tensors are repeated for these.
STORED = ("mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_128x128", "int4_g32_asymmetric", "nf4")
FUSED = (
    "mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_rowwise", "fp8_rowwise_e5m2", "fp8_tensorwise", "fp8_1x128", "fp8_128x128",
    "int8_rowwise",
)  # fmt: skip


def race_jobs(settings: Settings) -> list[Job]:
    """Family "races"."""
    names = REPRESENTATIVE[:: 1 if settings.fraction > 0.2 else 5]
    made = [Job("races", f"quantize {name}", "quantize", quantize_race, (name,), 4.0) for name in names]
    made += [Job("races", f"stored {name}", "dequantize", stored_race, (name,), 4.0) for name in STORED]
    made += [Job("races", f"fused {name}", "quantize_both", fused_race, (name,), 4.0) for name in FUSED]
    return [*made, Job("races", "codes", "encode", code_race, (), 4.0)]


def repeat(run: Run, function: str, label: str, *args: Any, **keywords: Any) -> None:
    """One call compared with the reference, and all its repetitions with the first of them, on the device."""
    if not hasattr(run.fast, function):
        return
    placed, options = run.put(args), {key: run.put(value) for key, value in keywords.items()}
    call = lambda: getattr(run.fast, function)(*placed, **options)  # noqa: E731
    first = run.guarded(call)
    if not run.compare(function, label, first, run.expect(function, *args, **keywords), x=args[0]):
        return
    times = run.settings.few(REPETITIONS, 5)
    seen = [repetition(run, call, first, step) for step in range(times)]
    wrong = [f"repetition {step}: {text}" for step, text in enumerate(seen) if text]
    run.record(function, f"{label} x {times}", times, len(wrong), wrong[:3])


def repetition(run: Run, call: Callable[[], Any], first: Any, step: int) -> str:
    """What differs from the first result, or nothing. Freed memory is filled too, for outputs that C++ allocates."""
    run.calls += 1
    fill_freed([item.nbytes for item in tensors(first)], run.device, 17 * step % 256)
    got = run.guarded(call)
    if isinstance(got, Failure):
        return f"{got.kind}: {got.text}"
    before, now = tensors(first), tensors(got)
    bad = [int((_bytes(a) != _bytes(b)).sum()) for a, b in zip(before, now, strict=True)]
    return f"{bad} bytes of its arrays differ" if any(bad) else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def quantize_race(run: Run, name: str) -> None:
    """Quantizing, its scales, and fake quantization with the gradient of given scales."""
    shape = RACE_SHAPE if run.settings.fraction > 0.2 else (64, 1024)
    x = normals(shape, "bfloat16")
    x[3, 5], x[-1, -1] = np.nan, np.inf
    repeat(run, "quantize", "rows", x, name)
    repeat(run, "quantize", "columns", x, name, axis=0)
    repeat(run, "fake_quantize", "rows", x, name)
    scales = run.expect("choose_scales", normals(shape, seed=1).astype(NUMPY["bfloat16"]), name)
    repeat(run, "fake_quantize_vjp", "given scales", x, x, name, scales=scales)


def stored_race(run: Run, name: str) -> None:
    """Dequantization, packed and not, and float16 input whose rows end within a tile."""
    shape = RACE_SHAPE if run.settings.fraction > 0.2 else (64, 1024)
    x = normals(shape, seed=2)
    repeat(run, "dequantize", "float32", run.expect("quantize", x, name))
    repeat(run, "dequantize", "bfloat16", run.expect("quantize", x, name), "bfloat16")
    repeat(run, "quantize", "packed", x, name, packed=True)
    repeat(run, "dequantize", "packed", run.expect("quantize", x, name, packed=True))
    odd = normals((1536, 96) if SCHEMES[name].scale.partial else (768, 96), "float16", seed=3)
    repeat(run, "quantize", "float16", odd, name)


def fused_race(run: Run, name: str) -> None:
    """Both copies, normalization and SwiGLU."""
    shape = RACE_SHAPE if run.settings.fraction > 0.2 else (64, 1024)
    x, up = normals(shape, "bfloat16", seed=4), normals(shape, "bfloat16", seed=5)
    weight = normals(shape[-1:], "bfloat16", seed=6)
    repeat(run, "quantize_both", "matrix", x, name)
    odd = x[: shape[0] - 32, : shape[1] - 32] if SCHEMES[name].scale.partial else x
    repeat(run, "quantize_both", "float16", np.ascontiguousarray(odd).astype(np.float16), name)
    turned = run.put(x).t()
    wanted = run.expect("quantize", np.ascontiguousarray(x.T), name)
    for step in range(run.settings.few(REPETITIONS, 5)):
        got = run.guarded(lambda: run.fast.quantize(turned, name))
        if not run.compare("quantize", f"transpose {step}", got, wanted):
            return
    repeat(run, "rms_norm_quantize", "with residual", x, weight, name, residual=up)
    repeat(run, "swiglu_quantize", "product", x, up, name)


def code_race(run: Run) -> None:
    """Functions of codes, and stochastic rounding."""
    x = normals((512, 1024), seed=7)
    codes = np.random.default_rng(0).integers(0, 256, x.shape).astype(np.uint8)
    words = reference.random_bits(x.shape, seed=1)
    for fmt in ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn", "int3", "nf4", "bfloat16"):
        repeat(run, "encode", fmt, x, fmt)
        repeat(run, "decode", fmt, codes, fmt)
        repeat(run, "pack", fmt, codes, fmt)
        repeat(run, "unpack", fmt, reference.pack(codes, fmt), fmt, codes.shape)
    repeat(run, "encode", "stochastic", x, "float8_e5m2", rounding="stochastic", random_bits=words)
