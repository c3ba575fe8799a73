"""Every public function of `fast` in unusual situations, and the one answer that each of them has.

`EXAMPLES` are calls, `SITUATIONS` what is done to their operands, `ANSWERS` what has to come out where that is not "right":
the bits of the same call on ordinary tensors. `walk` tries a function in a situation; tests do that on a CPU, the validation on
a GPU. An answer is "right", or a class of errors with words of its message.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch

import fast
from reference import Quantized, Scales
from tests.support.examples import EXAMPLES, MANY, Example, Tensors

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
    ("linear_sparse", "autograd"): (NotImplementedError, "has no gradient"),
    ("linear_sparse", "torch.func.grad"): (NotImplementedError, "has no gradient"),
    ("matmul", "torch.func.grad"): (NotImplementedError, "has no gradient"),
    ("matmul_error_bound", "torch.func.grad"): (NotImplementedError, "has no gradient"),
    # Linear ones alone have forward mode.
    **{
        (name, "torch.func.jvp"): (NotImplementedError, "has no forward-mode derivative in")
        for name in (
            "fake_quantize", "fake_quantize, given", "rms_norm", "swiglu", "linear_swiglu", "linear_of_codes",
        )
    },
}  # fmt: skip


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


def close(made: Any, wanted: Any) -> bool:
    """Whether all tensors of two results are nearly the same."""
    pairs = tensors_of(made), tensors_of(wanted)
    return all(
        a.dtype == b.dtype and torch.allclose(a, b, rtol=0.02, atol=0.05) for a, b in zip(*pairs, strict=True)
    )


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
                host_made = [t.cpu() for t in tensors_of(made)]
                same = equal if example.exact or device == "cpu" else close
                return same(host_made, wanted)

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


def _total(example: Example, f: Any, tensors: Tensors, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sum of all results, a function of one operand."""

    def total(one: torch.Tensor) -> torch.Tensor:
        made = tensors_of(example.call(f, {**tensors, name: one}))
        return sum((part.float().sum() for part in made), torch.zeros((), device=one.device))

    return total


def func_grad(example: Example, f: Any, device: str) -> Tried:
    """`torch.func.grad` of the sum: what autograd gives, 0 where there is no gradient."""
    tensors = example.make(example.rows, device)
    for name, t in tensors.items():
        if not t.is_floating_point() or (example.gradients and name not in example.gradients):
            continue

        def tried(name: str = name, t: torch.Tensor = t) -> bool:
            total = _total(example, f, tensors, name)
            made, leaf = torch.func.grad(total)(t), t.clone().requires_grad_()
            y = total(leaf)
            if y.requires_grad:
                y.backward()
            return same_bits(made, leaf.grad if leaf.grad is not None else torch.zeros_like(t))

        yield name, tried


def func_jvp(example: Example, f: Any, device: str) -> Tried:
    """`torch.func.jvp` of the sum, of functions that have a gradient: <1, J t> is <J' 1, t>."""
    tensors = example.make(example.rows, device)
    for name in example.gradients:

        def tried(name: str = name, t: torch.Tensor = tensors[name]) -> bool:
            total = _total(example, f, tensors, name)
            pushed = torch.func.jvp(total, (t,), (t.flip(0),))[1]
            products = torch.func.grad(total)(t).float() * t.flip(0).float()
            return bool((pushed - products.sum()).abs() <= 0.02 * products.abs().sum())

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
    "torch.func.jvp": func_jvp,
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
