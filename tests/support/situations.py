"""Every public function of `fast` in unusual situations, and the one answer that each of them has.

`EXAMPLES` are calls, `SITUATIONS` what is done to their operands, `ANSWERS` what has to come out where that is not "right":
the bits of the same call on ordinary tensors. `walk` tries a function in a situation; tests do that on a CPU, the validation on
a GPU. An answer is "right", or a class of errors with words of its message.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

import fast
from reference import SCHEMES, Quantized, Scales

K = 64
#: Rows of a matrix with more than 2**31 elements.
MANY = 2**31 // K + 64
STORED = ("codes", "scale", "outer", "zero")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """A call. make: its tensors for some rows on a device. gradients: the operands that it has a gradient for."""

    make: Callable[[int, str], Tensors]
    call: Callable[[Any, Tensors], Any]
    gradients: tuple[str, ...] = ()
    #: Operands whose bits do not change under other dtypes.
    rows: int = 8


def normals(
    rows: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32, length: int = K
) -> torch.Tensor:
    """Reproducible values; nothing where there is no memory."""
    if device == "meta":
        return torch.empty(rows, length, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, generator=generator).to(dtype).to(device)


def codes(rows: int, device: str) -> torch.Tensor:
    """uint8 codes of 4 bits."""
    if device == "meta":
        return torch.empty(rows, K, dtype=torch.uint8, device=device)
    return (torch.arange(rows * K, dtype=torch.int32) % 16).to(torch.uint8).view(rows, K).to(device)


def weight(name: str, device: str, seed: int = 3, rows: int = 32) -> Tensors:
    """The parts of a stored weight."""
    q = fast.quantize(normals(rows, device, seed), name, packed=SCHEMES[name].format.bits < 8)
    return {part: t for part in STORED if (t := getattr(q, part)) is not None}


def stored(name: str, tensors: Tensors, rows: int = 32, end: str = "") -> Quantized:
    """A weight of its parts."""
    parts = [tensors.get(part + end) for part in STORED]
    scheme = SCHEMES[name]
    return Quantized(*parts, (rows, K), 1, scheme, scheme.format.bits < 8)


def two_weights(name: str, device: str) -> Tensors:
    """The parts of two."""
    second = {f"{part}2": t for part, t in weight(name, device, 4).items()}
    return {**weight(name, device), **second}


def words(rows: int, device: str) -> torch.Tensor:
    """Random bits."""
    if device == "meta":
        return torch.empty(rows, K, dtype=torch.uint32, device=device)
    return (torch.arange(rows * K, dtype=torch.int32) * 747796405).view(torch.uint32).view(rows, K).to(device)


def rows_of(t: torch.Tensor) -> int:
    """Rows of a matrix, of nested tensors those of each."""
    return 8 if getattr(t, "is_nested", False) else t.shape[0]


def row_scales(rows: int, device: str) -> torch.Tensor:
    """A scale for each row."""
    return torch.full((rows, 1), 0.03125, device=device)


def bf16(rows: int, device: str, seed: int = 0) -> torch.Tensor:
    """`normals` in bfloat16."""
    return normals(rows, device, seed, torch.bfloat16)


DRAWN = replace(SCHEMES["mxfp8_e4m3"], name="drawn", rounding="stochastic")
ASYMMETRIC, INT4, INT8 = "int8_rowwise_asymmetric", "int4_g32", "int8_rowwise"
EXAMPLES: dict[str, Example] = {
    "choose_scales": Example(lambda n, d: {"x": normals(n, d)}, lambda f, t: f.choose_scales(t["x"], "mxfp8_e4m3")),
    "quantize": Example(lambda n, d: {"x": normals(n, d)}, lambda f, t: f.quantize(t["x"], "nvfp4", packed=True)),
    "quantize, given": Example(
        lambda n, d: {"x": normals(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.quantize(t["x"], "fp8_rowwise", scales=t["scale"]),
    ),
    "quantize, drawn": Example(
        lambda n, d: {"x": bf16(n, d), "random_bits": words(n, d)},
        lambda f, t: f.quantize(t["x"], DRAWN, random_bits=t["random_bits"]),
    ),
    "dequantize": Example(
        lambda n, d: {"codes": codes(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.dequantize(
            Quantized(t["codes"], t["scale"], None, None, (rows_of(t["codes"]), K), 1, SCHEMES["fp8_rowwise"])
        ),
    ),
    "fake_quantize": Example(
        lambda n, d: {"x": normals(n, d)}, lambda f, t: f.fake_quantize(t["x"], "mxfp8_e4m3"), ("x",)
    ),
    "fake_quantize, given": Example(
        lambda n, d: {"x": normals(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.fake_quantize(t["x"], "int8_rowwise", scales=t["scale"]),
        ("x", "scale"),
    ),
    "fake_quantize_vjp": Example(
        lambda n, d: {"g": normals(n, d, 1), "x": normals(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.fake_quantize_vjp(t["g"], t["x"], "int8_rowwise", scales=t["scale"]),
    ),
    "quantize_both": Example(
        lambda n, d: {"x": bf16(n, d)}, lambda f, t: f.quantize_both(t["x"], "mxfp8_e4m3"), rows=64
    ),
    "quantize_both, given": Example(
        lambda n, d: {"x": bf16(n, d), "scale": row_scales(1, d).view(()), "scale2": 2 * row_scales(1, d).view(())},
        lambda f, t: f.quantize_both(t["x"], "fp8_tensorwise", scales=[t["scale"], t["scale2"]], packed=True), rows=64,
    ),
    "encode": Example(lambda n, d: {"x": normals(n, d)}, lambda f, t: f.encode(t["x"], "float6_e3m2fn")),
    "encode, drawn": Example(
        lambda n, d: {"x": normals(n, d), "random_bits": words(n, d)},
        lambda f, t: f.encode(t["x"], "bfloat16", rounding="stochastic", random_bits=t["random_bits"]),
    ),
    "decode": Example(lambda n, d: {"codes": codes(n, d)}, lambda f, t: f.decode(t["codes"], "float8_e4m3fn")),
    "pack": Example(lambda n, d: {"codes": codes(n, d)}, lambda f, t: f.pack(t["codes"], "int4")),
    "unpack": Example(
        lambda n, d: {"packed": codes(n, d)},
        lambda f, t: f.unpack(t["packed"], "int4", (rows_of(t["packed"]), 2 * K - 1)),
    ),
    "rms_norm": Example(
        lambda n, d: {"x": normals(n, d), "weight": normals(1, d, 1)[0], "residual": normals(n, d, 2)},
        lambda f, t: f.rms_norm(t["x"], t["weight"], residual=t["residual"]),
        ("x", "weight", "residual"),
    ),
    "rms_norm_quantize": Example(
        lambda n, d: {"x": bf16(n, d), "weight": bf16(1, d, 1)[0]},
        lambda f, t: f.rms_norm_quantize(t["x"], t["weight"], "mxfp8_e4m3"),
    ),
    "swiglu": Example(
        lambda n, d: {"gate": bf16(n, d), "up": bf16(n, d, 1)}, lambda f, t: f.swiglu(t["gate"], t["up"]), ("gate", "up")
    ),
    "swiglu_quantize": Example(
        lambda n, d: {"gate": bf16(n, d), "up": bf16(n, d, 1)},
        lambda f, t: f.swiglu_quantize(t["gate"], t["up"], "nvfp4"),
    ),
    "linear": Example(
        lambda n, d: {"x": bf16(n, d), **weight(INT4, d), "bias": normals(1, d, 5, length=32)[0]},
        lambda f, t: f.linear(t["x"], stored(INT4, t), t["bias"]),
        ("x", "bias"),
        rows=1,
    ),
    "linear_pair": Example(
        lambda n, d: {"x": bf16(n, d), **two_weights(INT8, d)},
        lambda f, t: f.linear_pair(t["x"], stored(INT8, t), stored(INT8, t, end="2")),
        ("x",),
        rows=1,
    ),
    "linear_swiglu": Example(
        lambda n, d: {"x": bf16(n, d), **two_weights(INT4, d)},
        lambda f, t: f.linear_swiglu(t["x"], stored(INT4, t), stored(INT4, t, end="2")),
        ("x",),
        rows=1,
    ),
    "linear_of_codes": Example(
        lambda n, d: {
            "x": codes(1, d), "x_scale": row_scales(1, d), **weight(INT8, d, rows=n), "bias": normals(1, d, 5, length=n)[0]
        },
        lambda f, t: f.linear_of_codes(
            Quantized(t["x"], t["x_scale"], None, None, (1, K), 1, SCHEMES[INT8]),
            stored(INT8, t, t["codes"].shape[0]), t["bias"], dtype=torch.bfloat16,
        ),
        ("bias",),
        rows=32,
    ),
    "matmul": Example(
        lambda n, d: {"a": normals(n, d), "b": normals(8, d, 1).T}, lambda f, t: f.matmul(t["a"], t["b"])
    ),
    "matmul_error_bound": Example(
        lambda n, d: {"a": normals(n, d), "b": normals(8, d, 1).T},
        lambda f, t: f.matmul_error_bound(t["a"], t["b"], accumulation="blocked", block=16),
    ),
    "prune": Example(
        lambda n, d: {"w": normals(n, d), "scores": normals(n, d, 1)}, lambda f, t: f.prune(t["w"], scores=t["scores"])
    ),
    "compress": Example(lambda n, d: {"w": normals(n, d)}, lambda f, t: f.compress(t["w"])),
    "decompress": Example(
        lambda n, d: {"values": normals(n, d)[:, ::2], "metadata": torch.full((n, K // 8), 0x44, dtype=torch.uint8, device=d)},
        lambda f, t: f.decompress(t["values"], t["metadata"]),
    ),
}  # fmt: skip

Error = tuple[type[Exception], str]
#: (example or any, situation, perhaps with the operand): the answer where it is not "right".
ANSWERS: dict[tuple[str, str], Error] = {
    ("", "sparse"): (TypeError, "takes dense tensors"),
    ("", "nested"): (TypeError, "takes dense tensors"),
    ("", "another device"): (ValueError, "takes tensors on one device"),
    ("", "another library"): (TypeError, "takes torch tensors"),
    # The specification multiplies by scales of any dtype; a kernel reads them as the record says.
    ("linear", "other dtype: scale"): (ValueError, "takes scale = float32"),
    # The specification has no gradient.
    ("matmul", "autograd"): (NotImplementedError, "has no gradient"),
    ("matmul_error_bound", "autograd"): (NotImplementedError, "has no gradient"),
    ("matmul", "torch.func.grad"): (NotImplementedError, "has no gradient"),
    ("matmul_error_bound", "torch.func.grad"): (NotImplementedError, "has no gradient"),
}


def tensors_of(result: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (Quantized, Scales)):
        return [t for f in fields(result) if isinstance(t := getattr(result, f.name), torch.Tensor)]
    return [t for part in result or () if part is not None for t in tensors_of(part)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape, dtype and bits."""
    a, b = a.detach(), b.detach()
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))) or bool(
        a.is_floating_point()
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def equal(made: Any, wanted: Any) -> bool:
    """Whether all tensors of two results are the same."""
    pairs = tensors_of(made), tensors_of(wanted)
    return len(pairs[0]) == len(pairs[1]) and all(map(same_bits, *pairs))


Tried = Iterator[tuple[str, Callable[[], bool]]]


def odd_addresses(example: Example, f: Any, device: str) -> Tried:
    """Each operand a byte or an element further on than an aligned one."""
    for name, t in example.make(example.rows, device).items():
        moved = torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape)
        yield name, lambda name=name, moved=moved: _changed(example, f, device, {name: moved})


def _changed(example: Example, f: Any, device: str, changed: Tensors) -> bool:
    """Whether a call with some other operands gives the same."""
    tensors = example.make(example.rows, device)
    wanted = example.call(f, tensors)
    return equal(example.call(f, {**tensors, **changed}), wanted)


def negative_views(example: Example, f: Any, device: str) -> Tried:
    """Each float a view of its negative."""
    for name, t in example.make(example.rows, device).items():
        if t.is_floating_point():
            view = torch._neg_view(-t)
            yield name, lambda name=name, view=view: _changed(example, f, device, {name: view})


def conjugate_views(example: Example, f: Any, device: str) -> Tried:
    """Each float32 the imaginary part of a conjugate."""
    for name, t in example.make(example.rows, device).items():
        if t.dtype == torch.float32:
            view = torch.complex(torch.zeros_like(t), -t).conj().imag
            yield name, lambda name=name, view=view: _changed(example, f, device, {name: view})


def other_dtypes(example: Example, f: Any, device: str) -> Tried:
    """Each operand in other dtypes, after the call was remembered: what the specification says, or its class of error."""
    import reference

    tensors = example.make(example.rows, device)
    for name, t in tensors.items():
        for dtype in (torch.float64, torch.float16, torch.int32, torch.complex64):
            other = t.clone().to(dtype)

            def tried(name: str = name, other: torch.Tensor = other) -> bool:
                for _ in range(2):
                    example.call(f, tensors)
                specified = reference if device == "cpu" else f
                host = {key: value.cpu() for key, value in tensors.items()}
                wanted = _outcome(lambda: example.call(_Specified(specified), {**host, name: other.cpu()}))
                made = _outcome(lambda: example.call(f, {**tensors, name: other}))
                if isinstance(made, Exception):
                    if isinstance(wanted, Exception) and isinstance(made, (TypeError, ValueError)):
                        return True
                    raise made
                if isinstance(wanted, Exception):
                    return False
                return equal([t.cpu() for t in tensors_of(made)], wanted)

            yield f"{name} as {dtype}", tried


class _Specified:
    """The functions of `reference`, and of `fast` where there is no such one."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name, getattr(fast, name))


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  the outcome is what is compared
        return error


def vmapped(example: Example, f: Any, device: str) -> Tried:
    """A batch of two of the first operand: as one after the other."""
    tensors = example.make(example.rows, device)
    name, x = next(iter(tensors.items()))
    batch = torch.stack([x, x.flip(0) if x.dtype != torch.uint32 else x])

    def tried() -> bool:
        made = torch.vmap(lambda one: tuple(tensors_of(example.call(f, {**tensors, name: one}))))(batch)
        wanted = [tensors_of(example.call(f, {**tensors, name: one})) for one in batch]
        return equal(made, [torch.stack(parts) for parts in zip(*wanted, strict=True)])

    yield name, tried


def autograd(example: Example, f: Any, device: str) -> Tried:
    """Operands that require a gradient: those of a function that has one get it, others have no history."""
    tensors = example.make(example.rows, device)
    for name, t in tensors.items():
        if not t.is_floating_point() or (example.gradients and name not in example.gradients):
            continue

        def tried(name: str = name, t: torch.Tensor = t) -> bool:
            leaf = t.clone().requires_grad_()
            made = tensors_of(example.call(f, {**tensors, name: leaf}))
            learned = [one for one in made if one.requires_grad and one is not leaf]
            if not learned:
                return not example.gradients and equal(made, example.call(f, tensors))
            sum(one.float().sum() for one in learned).backward()
            return bool(leaf.grad is not None and leaf.grad.shape == t.shape and leaf.grad.dtype == t.dtype)

        yield name, tried


def func_grad(example: Example, f: Any, device: str) -> Tried:
    """`torch.func.grad` of the sum: what autograd gives, 0 where there is no gradient."""
    tensors = example.make(example.rows, device)
    for name, t in tensors.items():
        if not t.is_floating_point() or (example.gradients and name not in example.gradients):
            continue

        def total(one: torch.Tensor, name: str = name) -> torch.Tensor:
            made = tensors_of(example.call(f, {**tensors, name: one}))
            return sum((part.float().sum() for part in made), torch.zeros((), device=one.device))

        def tried(t: torch.Tensor = t, total: Any = total) -> bool:
            made, leaf = torch.func.grad(total)(t), t.clone().requires_grad_()
            y = total(leaf)
            if y.requires_grad:
                y.backward()
            return same_bits(made, leaf.grad if leaf.grad is not None else torch.zeros_like(t))

        yield name, tried


def meta(example: Example, f: Any, device: str) -> Tried:
    """Tensors without memory: shapes and dtypes."""

    def tried() -> bool:
        there = {name: t.to("meta") for name, t in example.make(example.rows, device).items()}
        made, wanted = (tensors_of(example.call(f, t)) for t in (there, example.make(example.rows, device)))
        return all(t.is_meta for t in made) and [(t.shape, t.dtype) for t in made] == [
            (t.shape, t.dtype) for t in wanted
        ]

    yield "", tried


def huge(example: Example, f: Any, device: str) -> Tried:
    """More than 2**31 elements, by shape alone."""

    def tried() -> bool:
        made = tensors_of(example.call(f, example.make(MANY, "meta")))
        return bool(made) and all(t.is_meta for t in made) and max(t.numel() for t in made) >= MANY

    yield "", tried


def sparse(example: Example, f: Any, device: str) -> Tried:
    """The first operand stored sparsely, after the call was remembered."""
    tensors = example.make(example.rows, device)
    name, x = next(iter(tensors.items()))
    for _ in range(2):
        example.call(f, tensors)
    yield name, lambda: example.call(f, {**tensors, name: x.to_sparse()}) is None


def nested(example: Example, f: Any, device: str) -> Tried:
    """The first operand as a nested tensor."""
    tensors = example.make(example.rows, device)
    name, x = next(iter(tensors.items()))
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the strided ones are a prototype, it says
            jagged = torch.nested.nested_tensor([x, x], layout=layout)
        yield f"{name} {layout}", lambda jagged=jagged: example.call(f, {**tensors, name: jagged}) is None


def another_device(example: Example, f: Any, device: str) -> Tried:
    """Each further operand elsewhere."""
    tensors = example.make(example.rows, device)
    for name, t in list(tensors.items())[1:]:
        yield name, lambda name=name, t=t: example.call(f, {**tensors, name: t.to("meta")}) is None


def fullgraph(example: Example, f: Any, device: str) -> Tried:
    """One graph, without breaks."""

    def tried() -> bool:
        tensors = example.make(example.rows, device)
        torch._dynamo.reset()
        program = torch.compile(
            lambda t: tuple(tensors_of(example.call(f, t))), fullgraph=True, backend="eager"
        )
        return equal(program(tensors), example.call(f, tensors))

    yield "", tried


SITUATIONS = {
    "odd address": odd_addresses,
    "negative view": negative_views,
    "conjugate view": conjugate_views,
    "other dtype": other_dtypes,
    "vmap": vmapped,
    "autograd": autograd,
    "torch.func.grad": func_grad,
    "meta": meta,
    "more than 2**31 elements": huge,
    "sparse": sparse,
    "nested": nested,
    "another device": another_device,
    "fullgraph": fullgraph,
}


def walk(example: str, situation: str, device: str = "cpu", f: Any = fast) -> Iterator[str]:
    """What is not as `ANSWERS` states it, in words."""
    general = ANSWERS.get((example, situation), ANSWERS.get(("", situation)))
    for label, tried in SITUATIONS[situation](EXAMPLES[example], f, device):
        made = _outcome(tried)
        known = ANSWERS.get((example, f"{situation}: {label.partition(' ')[0]}"), general)
        if made is True and situation == "other dtype":
            continue  # the specification refuses it, too
        if known is not None and not (isinstance(made, known[0]) and known[1] in str(made)):
            yield f"{example}, {situation}, {label}: {made!r:.300}, not {known[0].__name__}: {known[1]}"
        if known is None and made is not True:
            yield f"{example}, {situation}, {label}: {made!r:.300}"


__all__ = ["ANSWERS", "EXAMPLES", "SITUATIONS", "walk"]
