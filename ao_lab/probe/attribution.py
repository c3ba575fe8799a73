"""What each layer costs the model's outputs, by one backward pass; and what a candidate costs in truth, by a forward pass.

To first order a layer whose outputs err by e moves an output of the model by g . e, with g the gradient of that output. One
backward pass of sum_c r_c z_c, r_c = +1 or -1 drawn anew for every output z_c of every example, gives for each example the sum
d = sum over its tokens of g . e, and E[d^2] over draws is the sum over outputs of their squared changes. So sqrt(mean d^2 /
outputs) is the root mean square change of an output: of a logit of a click, of logits of classes or tokens alike. Sums of d
over layers, squared, keep what errors of layers have in common.

Inputs are those of the model as it is: what a changed input of a later layer does is what g says, and how it would be rounded
otherwise is of second order. `measured` runs the model with every product of quantized operands instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from ao_lab.choose.scores import counted
from ao_lab.probe.candidates import reason_against
from ao_lab.probe.sites import Site, input_of, matrix, watching
from ao_lab.training.casts import STREAMS, Matrix, quantize_one
from ao_lab.training.products import values
from ao_lab.transforms.data import Call
from ao_lab.transforms.walk import first_tensor
from fast.layers.hadamard import hadamard
from reference.probe.estimates import Estimate, mean
from reference.training.recipe import Recipe

#: What a model returns as outputs (examples, ...) that are looked at: logits.
Outputs = Callable[[Any], torch.Tensor]
#: A site's weight as a candidate reads it, float32, from the weight in the dtype of its inputs.
Weights = Callable[[Site, torch.Tensor], torch.Tensor]


def outputs_of(output: Any) -> torch.Tensor:
    """A model's logits, or the first tensor of what it returns: (examples, ...)."""
    logits = getattr(output, "logits", None)
    found: torch.Tensor = first_tensor(output, "the model") if logits is None else logits
    return found


def checked(outputs: Outputs, output: Any) -> torch.Tensor:
    """The outputs; ValueError unless they are finite floats with an axis of examples."""
    z = outputs(output)
    if not isinstance(z, torch.Tensor) or not z.is_floating_point() or not z.dim():
        raise ValueError(
            "outputs: a probe looks at floats (examples, ...), such as logits; give outputs=, which finds them"
        )
    if not z.numel():
        raise ValueError(
            f"the model's outputs are empty on a batch, of shape {tuple(z.shape)}; leave that batch out"
        )
    if not bool(z.isfinite().all()):
        raise ValueError("the model's outputs are NaN or infinite on a batch; leave that batch out")
    return z


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Detached, so that an input that asks for a gradient gets none; of inference mode a copy, which a graph takes."""
    return x.clone() if x.is_inference() else x.detach()


def counting(call: Call, z: torch.Tensor) -> torch.Tensor:
    """Which outputs count, of their shape: those of tokens that are no padding."""
    if z.dim() < 2:
        return torch.ones_like(z, dtype=torch.bool)
    return counted(call, z).reshape(z.shape[:-1])[..., None].expand(z.shape)


@dataclass
class Attribution:
    """The passes: by candidate and site, d of every example."""

    sites: Sequence[Site]
    recipes: Mapping[str, Recipe]
    outputs: Outputs
    generator: torch.Generator
    seed: int = 0
    #: Of the batch that runs: by candidate and site, d of its examples.
    running: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    #: Of each pass: d by candidate and site that it reached, and the root of how many outputs count of each example.
    passes: list[tuple[dict[tuple[str, str], torch.Tensor], torch.Tensor]] = field(default_factory=list)
    #: Sums over counted outputs of z and z^2, and their number.
    moments: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    examples: int = 0
    unmatched: set[str] = field(default_factory=set)
    quantized: dict[tuple[str, str], Matrix] = field(default_factory=dict)

    def run(
        self, model: nn.Module, call: Call, see: Callable[[Site, torch.Tensor], None], directions: int
    ) -> None:
        """Take in one batch; see(site, x) gets what each site reads."""
        args, kwargs = tree_map_only(torch.Tensor, _apart, call)
        self.running, seen = {}, set[int]()

        def add(site: Site, x: torch.Tensor, g: torch.Tensor | None) -> None:
            # One of a graph lives as long as that, so that no other has its place in memory.
            if g is None or id(x) not in seen:
                see(site, x)
            if g is not None:
                seen.add(id(x))
                self._add(site, matrix(x), x.shape, matrix(g))

        with watching(self.sites, add, begin=True), torch.enable_grad():
            z = checked(self.outputs, model(*args, **kwargs))
            self.examples = len(z)
            which = counting(call, z)
            self._note(z.detach(), which)
            per = which.reshape(len(z), -1).sum(1).to("cpu", torch.float64).clamp_min(1).sqrt()
            for i in range(directions):
                z.backward(self._direction(z, which), retain_graph=i + 1 < directions)  # type: ignore[no-untyped-call]
                self.passes.append((self.running, per))
                self.running = {}

    def _direction(self, z: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, z.shape, generator=self.generator, dtype=torch.int8).to(z.device)
        return (2 * signs - 1).to(z.dtype) * which

    def _note(self, z: torch.Tensor, which: torch.Tensor) -> None:
        some = z[which].to("cpu", torch.float64)
        self.moments += torch.stack([some.sum(), some.square().sum(), some.new_tensor(some.numel())])

    def _add(self, site: Site, x: torch.Tensor, shape: torch.Size, g: torch.Tensor) -> None:
        if not bool(g.isfinite().all()):
            raise ValueError(
                f"{site.name}: the gradient at its outputs is NaN or infinite; run the model in bfloat16 or float32, or leave "
                f"out the batch that makes it"
            )
        w = site.weight().to(x.dtype)
        back = g.float() @ w.float()
        for name, recipe in self.recipes.items():
            if reason_against(recipe, site.shape) is None:
                d = self._tokens(name, recipe, site, x, w, g, back)
                key = name, site.name
                found = self._by_example(site, d.to("cpu", torch.float64), shape)
                self.running[key] = self.running[key] + found if key in self.running else found

    def _tokens(
        self,
        name: str,
        recipe: Recipe,
        site: Site,
        x: torch.Tensor,
        w: torch.Tensor,
        g: torch.Tensor,
        back: torch.Tensor,
    ) -> torch.Tensor:
        """g . e of each token: (g (q(w) - w)) . q(x) + (g w) . (q(x) - x), so that nothing large cancels."""
        length = recipe.output.a.hadamard
        plain = [hadamard(one.float(), length) if length else one.float() for one in (x, w)]
        a = values(quantize_one(x, recipe.output.a, self.seed, STREAMS["x"]), torch.float32)
        found = ((hadamard(back, length) if length else back) * (a - plain[0])).sum(1, dtype=torch.float64)
        if recipe.output.b.scheme is not None:
            b = self.weight(name, site, w)
            found += ((g.float() @ (b - plain[1])) * a).sum(1, dtype=torch.float64)
        return found

    def weight(self, name: str, site: Site, w: torch.Tensor) -> torch.Tensor:
        """A weight as a candidate reads it, float32; quantized once."""
        key = name, site.name
        if key not in self.quantized:
            self.quantized[key] = quantize_one(w, self.recipes[name].output.b, self.seed, STREAMS["w"])
        return values(self.quantized[key], torch.float32)

    def _by_example(self, site: Site, d: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Sums over the tokens of each example; where tokens cannot be told apart as many examples share their squares."""
        count = self.examples
        if shape[0] == count or (len(shape) == 2 and len(d) % count == 0):
            return d.reshape(count, -1).sum(1)
        self.unmatched.add(site.name)
        signs = 2.0 * torch.randint(0, 2, (count,), generator=self.generator) - 1
        return signs * (d.square().sum() / count).sqrt()

    def of(self, candidate: str, site: str) -> torch.Tensor | None:
        """d of every example and direction, 0 where a pass did not reach a site; None where none did."""
        key = candidate, site
        if not any(key in found for found, _ in self.passes):
            return None
        return torch.cat([found.get(key, torch.zeros_like(per)) / per for found, per in self.passes])

    def variance(self, candidate: str, site: str) -> Estimate | None:
        """What a site adds to the mean square change of an output."""
        d = self.of(candidate, site)
        return None if d is None else mean(d.square().numpy())

    def predicted(self, candidate: str) -> tuple[float, float]:
        """The root mean square change of an output with all sites in a candidate, and as if they erred independently."""
        found = [d for site in self.sites if (d := self.of(candidate, site.name)) is not None]
        if not found:
            return 0.0, 0.0
        whole = torch.stack(found)
        return float(whole.sum(0).square().mean().sqrt()), float(whole.square().mean(1).sum().sqrt())

    def error(self, candidate: str) -> float | None:
        """The standard error of the first of both numbers; None of a single example and direction."""
        found = [d for site in self.sites if (d := self.of(candidate, site.name)) is not None]
        whole = torch.stack(found).sum(0).square() if found else torch.zeros(0)
        if len(whole) < 2:
            return None
        # Of a root: that of the mean square over twice the root.
        return float(whole.std() / len(whole) ** 0.5 / (2 * whole.mean().sqrt().clamp_min(1e-300)))

    @property
    def spread(self) -> float:
        """The standard deviation of the outputs."""
        total, squares, count = self.moments.tolist()
        return max(squares / count - (total / count) ** 2, 0.0) ** 0.5 if count else 0.0


@contextmanager
def emulated(
    sites: Sequence[Site], recipe: Recipe, seed: int = 0, weights: Weights | None = None
) -> Iterator[None]:
    """Inside, each site that can gives the product of quantized operands, in float32, plus its bias, in its outputs' dtype.

    weights: finds them where they were quantized before.
    """
    handles: list[Any] = []

    def of(site: Site) -> Callable[..., Any]:
        def hook(
            module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
        ) -> torch.Tensor:
            x = input_of(args, kwargs)
            if x is None:
                return output
            w = site.weight().to(x.dtype)
            a = values(quantize_one(matrix(x), recipe.output.a, seed, STREAMS["x"]), torch.float32)
            b = (
                values(quantize_one(w, recipe.output.b, seed, STREAMS["w"]), torch.float32)
                if weights is None
                else weights(site, w)
            )
            y = F.linear(a, b, None if module.bias is None else module.bias.detach().float())
            return y.reshape(output.shape).to(output.dtype)

        return hook

    try:
        for site in sites:
            if reason_against(recipe, site.shape) is None:
                handles.append(site.module.register_forward_hook(of(site), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def measured_change(
    model: nn.Module,
    calls: Sequence[Call],
    sites: Sequence[Site],
    recipe: Recipe,
    outputs: Outputs,
    seed: int = 0,
    weights: Weights | None = None,
) -> float:
    """The root mean square change of an output of these batches with all sites in a candidate."""
    squares, count = 0.0, 0
    for call in calls:
        args, kwargs = call
        before = checked(outputs, model(*args, **kwargs))
        with emulated(sites, recipe, seed, weights):
            after = checked(outputs, model(*args, **kwargs))
        change = (after - before).double()
        some = change[counting(call, before)]
        squares, count = squares + float(some.square().sum()), count + some.numel()
    return float((squares / max(count, 1)) ** 0.5)
