"""`Probe`: what low precision would cost each layer of a model in training, sampled every so many steps.

    probe = ao_lab.Probe(model, ["rowwise", "mxfp8"], every=100)
    for batch in data:
        with probe.step():
            loss = model(batch)
            loss.backward()
        optimizer.step()
    print(probe.report())

In 99 of 100 steps nothing is there: no hook, no copy, and a compiled model runs its program. A step that is due runs eagerly,
compiled models too (`torch.compiler.set_stance`), so that nothing is compiled anew, with a hook at each site that keeps some
tokens: their inputs, and the gradients at their outputs. Which ones is drawn in time by their number, not by the batch's, and
once for all sites that see as many; the host waits for the device once, where tokens join the sample. So a probe costs, of a
step's time, (one eager step less one of the ordinary ones, plus the copies of `tokens` rows a site) / every; `overhead` is what
was measured on the host's clock. Errors are found from the kept tokens and the weights of the moment when `report` is called.

Under DistributedDataParallel and FSDP2 each process keeps tokens of its own data, and `gather` joins them; weights that are
sharded are gathered one after the other in `report`, which all processes call then. With `gradients=True` the error of each
weight gradient is compared with the noise of its minibatch in the steps that are due, of the whole batch of this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ao_lab.probe.candidates import candidates_of, gradient_errors, products_of, reason_against
from ao_lab.probe.files import State, read_state, write_state
from ao_lab.probe.measure import measured_site
from ao_lab.probe.report import ProbeReport, SiteLine, judged
from ao_lab.probe.reservoir import Chosen, Reservoir, Step, all_finite
from ao_lab.probe.sites import Site, matrix, refuse_unseen, sites_of, watching
from ao_lab.transforms.plan import Filter
from reference.arrays.namespace import choice
from reference.probe import errors
from reference.probe.estimates import Estimate

#: By candidate and site: sums over a minibatch, |error of its gradient|^2 and |noise|^2, for each that was seen.
Noise = dict[tuple[str, str], list[tuple[float, float]]]


class Probe:
    """See the module text. Nothing of the model is changed, and nothing is on it between two steps.

    candidates: as `probe_` takes them. filter_fn: which linear layers. every: steps from one sample to the next, the
    first step is one. tokens: kept of each site, at random over all samples; half_life: in steps, after which a token is
    half as likely to be among them, for models that still move. nonfinite: "raise" a ValueError at the end of a step whose
    inputs or gradients hold NaN or infinity, or "skip" that step and count it in `skipped`. Either way what was kept before
    stays.
    """

    def __init__(
        self,
        model: nn.Module,
        candidates: Any,
        *,
        filter_fn: Filter | None = None,
        every: int = 100,
        tokens: int = 1024,
        half_life: float = inf,
        gradients: bool = False,
        nonfinite: str = "raise",
        seed: int = 0,
    ) -> None:
        choice(nonfinite, ("raise", "skip"), "nonfinite")
        if every < 1 or tokens < 2 or not half_life > 0:
            raise ValueError(
                f"every is at least 1, tokens at least 2 and half_life positive, got {every}, {tokens} and {half_life}"
            )
        self.sites, self.recipes = sites_of(model, filter_fn), candidates_of(candidates)
        self.every, self.gradients, self.nonfinite, self.seed = every, gradients, nonfinite, seed
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.samples = {
            site.name: Reservoir(tokens, seed=seed, stream=rank, half_life=half_life) for site in self.sites
        }
        self.steps, self.skipped = 0, 0
        self.noise: Noise = {}
        #: Tokens of a batch at each site, the most that were seen.
        self.batch: dict[str, int] = {}
        #: Seconds of ordinary and of sampled steps, and how many there were.
        self.seconds: dict[bool, tuple[float, int]] = {False: (0.0, 0), True: (0.0, 0)}
        self._open: ExitStack | None = None
        self._pending: dict[str, list[Chosen]] = {}
        self._noise: Noise = {}
        self._step = Step()

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Around the forward and backward of one step; whether this one is sampled. After an error in it nothing is kept."""
        started = time.perf_counter()
        due = self.begin()
        try:
            yield due
        except BaseException:
            self._close()
            raise
        self.end()
        total, count = self.seconds[due]
        self.seconds[due] = total + time.perf_counter() - started, count + 1

    def begin(self) -> bool:
        """The beginning of a step, for loops of others (`on_step_begin` of a Trainer); whether it is sampled."""
        self._close()
        due = self.steps % self.every == 0
        self.steps += 1
        if due:
            self._open = ExitStack()
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
            self._open.enter_context(watching(self.sites, self._see))
        return due

    def end(self) -> None:
        """The end of a step: what it kept joins the sample, all or nothing."""
        pending, noise, step = self._pending, self._noise, self._step
        self._close()
        try:
            if not all_finite(chosen for some in pending.values() for chosen in some):
                for site in self.sites:  # the first layer that has them is told of
                    for chosen in pending.get(site.name, ()):
                        chosen.check(site.name)
            _check_noise(noise)
        except ValueError:
            self.skipped += 1
            if self.nonfinite == "raise":
                raise
            return
        for name, found in pending.items():
            # A forward that is run again for the backward leaves inputs without gradients beside those that have some.
            some = [chosen for chosen in found if chosen.g is not None] or found
            for chosen in some:
                self.samples[name].add(chosen, step)
                self.batch[name] = max(self.batch.get(name, 0), chosen.count)
        for key, values in noise.items():
            self.noise.setdefault(key, []).extend(values)

    def _close(self) -> None:
        stack, self._open, self._pending, self._noise = self._open, None, {}, {}
        self._step = Step()
        if stack is not None:
            stack.close()

    def _see(self, site: Site, x: torch.Tensor, g: torch.Tensor | None) -> None:
        if self._open is None:
            return  # a backward after the step has ended
        with torch.no_grad():
            chosen = self.samples[site.name].choose(x, g, float(self.steps), self._step)
            self._pending.setdefault(site.name, []).append(chosen)
            if self.gradients and g is not None:
                self._add_noise(site, matrix(x), matrix(g))

    def _add_noise(self, site: Site, x: torch.Tensor, g: torch.Tensor) -> None:
        half = len(x) // 2
        halves = (
            g[:half].float().T @ x[:half].float() - g[half : 2 * half].float().T @ x[half : 2 * half].float()
        )
        spread = float(halves.double().square().sum())
        for name, recipe in self.recipes.items():
            if half and "weight_grad" in products_of(recipe) and reason_against(recipe, site.shape) is None:
                found = gradient_errors(recipe, x, None, g.to(x.dtype), self.seed + self.steps)[
                    "weight_grad"
                ][0]
                change = float(found.square().sum())
                self._noise.setdefault((name, site.name), []).append((change, spread))

    def gather(self, group: Any = None) -> None:
        """Join the samples of all processes of a group, which all call this; each has all of them then."""
        own = {
            "samples": {name: (one.x.cpu(), None if one.g is None else one.g.cpu(), one.keys, one.count)
                        for name, one in self.samples.items()},
            "noise": self.noise, "batch": self.batch,
        }  # fmt: skip
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, own, group)
        device = {name: one.x.device for name, one in self.samples.items()}
        self.noise, self.batch = {}, {}
        for name, sample in self.samples.items():
            joined = Reservoir(
                sample.size, seed=sample.seed, stream=sample.stream, half_life=sample.half_life
            )
            joined.draws = sample.draws
            for part in parts:
                x, g, keys, count = part["samples"][name]
                joined.add(Chosen(x.to(device[name]), None if g is None else g.to(device[name]), keys, count))
            self.samples[name] = joined
        for part in parts:
            for key, values in part["noise"].items():
                self.noise.setdefault(key, []).extend(values)
            for name, count in part["batch"].items():
                self.batch[name] = max(self.batch.get(name, 0), count)

    def report(self) -> ProbeReport:
        """The errors of all candidates on the kept tokens, with the weights as they are now; ValueError for sites that no
        sampled step reached."""
        refuse_unseen([site.name for site in self.sites if not self.samples[site.name].count])
        with torch.no_grad():
            lines = [self._line(site) for site in self.sites]
        notes = (f"{self.skipped} sampled steps with NaN or infinity were left out",) if self.skipped else ()
        return ProbeReport(judged(lines, {}), {}, self.steps, notes)

    def _line(self, site: Site) -> SiteLine:
        sample = self.samples[site.name]
        more: Mapping[str, dict[str, Estimate]] = {
            name: {"noise": errors.ratio_of_squares(*zip(*self.noise[name, site.name], strict=True))}
            for name in self.recipes
            if (name, site.name) in self.noise
        }
        return measured_site(
            site,
            self.recipes,
            sample.x,
            sample.g,
            tokens=self.batch.get(site.name, sample.count),
            more=more,
            seed=self.seed,
        )

    def overhead(self) -> float:
        """The share that sampling adds to the time of ordinary steps, on the host's clock; NaN before there is one of each.

        The first sampled step, which also warms up, counts like the others.
        """
        (plain, many), (sampled, few) = self.seconds[False], self.seconds[True]
        if not many or not few:
            return float("nan")
        return (sampled / few / (plain / many) - 1) / self.every

    def save(self, path: str | Path, inputs: str = "tokens") -> None:
        """Write what was kept to a safetensors file: "tokens" as they are, or in their place a model of them, "gaussian",
        "elliptical", "copula" or "low_rank" (`reference.probe.inputs`), where inputs may not be stored; gradients are left
        out then."""
        state = State(self.steps, self.skipped, self.samples, self.noise, self.batch)
        write_state(Path(path), self.sites, state, inputs)

    def load(self, path: str | Path) -> None:
        """Go on from a file of `save`: steps, samples, noise. Tokens are drawn from a model where the file holds one.

        ValueError for a file of another model, or none of a probe; nothing has changed then.
        """
        state = read_state(Path(path), self.sites, self.samples)
        self.steps, self.skipped, self.samples = state.steps, state.skipped, state.samples
        self.noise, self.batch = state.noise, state.batch


def _check_noise(noise: Noise) -> None:
    """ValueError for NaN and infinity, of tokens that the sample may lack."""
    for (_, site), values in noise.items():
        if not all(map(isfinite, (one for pair in values for one in pair))):
            raise ValueError(
                f"{site}: inputs or gradients at the outputs are NaN or infinite in a batch; leave that batch out"
            )


__all__ = ["Probe"]
