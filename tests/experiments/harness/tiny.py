"""Settings so small that a whole experiment takes seconds, on a corpus made here."""

import functools
import types
from dataclasses import replace
from functools import cache

import torch

import reference
from ao_lab.measure.turns import Plan
from experiments.data.corpus import Corpus, Document
from experiments.data.evaluation import MultipleChoiceSettings
from experiments.kernels import run
from experiments.kernels.cases import CASES
from experiments.kernels.run import Bench
from experiments.models.llama import LanguageModel, ModelSettings
from experiments.models.train import Trained, TrainSettings
from experiments.runs.settings import Settings

#: The model of a training from scratch: two small layers.
PRETRAINED = ModelSettings(width=32, layers=1, heads=2, kv_heads=2, feed_forward=64, context=16)

# A watch without a GPU, and kernels that are the reference: a whole benchmark runs on the CPU in a second.

SHAPE = (256, 512)
TINY = {"256x512": SHAPE}
#: How a case names a function that is no public one of `fast`.
SATURATION_MASK = "quantize.fake_quantize.fake_quantize_with_mask"
PLAN = Plan(rounds=3, warmup=1, span=1e-9)


class FakeWatch:
    """Makes the calls, and reports microseconds from a script, or one that grows by a tenth with every round."""

    def __init__(self, script=None):
        self.script = script
        self.rounds = 0
        self.captured = []

    def capture(self, calls):
        self.captured.append(len(calls))
        return calls[0]

    def seconds(self, calls, *, cold=False):
        self.rounds += 1
        for call in calls:
            call()
        if self.script:
            return [next(self.script) for _ in calls]
        return [1e-6 * (1 + 0.1 * (self.rounds % 3)) * (place + 1) for place in range(len(calls))]

    def sync(self):
        pass


def bench(folder, *, fast=reference, watch=None, baselines=(), **changes):
    """Settings of a tiny run."""
    made = Bench(
        settings=replace(settings(folder), text=None),
        fast=fast,
        watch=watch or FakeWatch(),
        plan=PLAN,
        baseline_plan=PLAN,
        baselines=baselines,
    )
    return replace(made, **changes)


def values_of(rows, method):
    return {row.metric: row.value for row in rows if row.method == method}


def measured(folder, names, **changes):
    return run.measure(bench(folder, **changes), run.pairs([CASES[name] for name in names], TINY))


def saturation_mask(x, scheme):
    """What `fast.quantize.fake_quantize.fake_quantize_with_mask` makes where there are no kernels."""
    return reference.fake_quantize(x, scheme), None


def linear_of_codes(x, w, bias=None, *, dtype, fast_sums=False):
    """`fast.linear_of_codes` as the reference specifies it."""
    name = str(dtype).removeprefix("torch.")
    return reference.linear(x, w, bias, accumulation="blocked", block=w.shape[1], out_dtype=name)


def linear_pair(x, first, second):
    """`fast.linear_pair`: two products."""
    return reference.linear(x, first), reference.linear(x, second)


def linear_swiglu(x, gate, up):
    """`fast.linear_swiglu`: two products and `swiglu`."""
    return reference.swiglu(*linear_pair(x, gate, up))


def specified():
    """The reference under the names of `fast`."""
    made = {name: getattr(reference, name) for name in reference.__all__}
    others = {one.__name__: one for one in (linear_of_codes, linear_pair, linear_swiglu)}
    return {**made, **others, SATURATION_MASK: saturation_mask}


def broken(function, change):
    """A `fast` in which one function's result is changed."""
    made = specified()
    right = made[function]
    made[function] = functools.wraps(right)(lambda *args, **kwargs: change(right(*args, **kwargs)))
    return types.SimpleNamespace(**made)


def flipped(part, place=(-1, -1)):
    """One bit of one number of a Quantized changed."""

    def change(q):
        tensor = getattr(q, part).clone()
        view = tensor.view(torch.uint8)
        view[place] ^= 1
        return replace(q, **{part: tensor})

    return change


MODEL = ModelSettings(width=256, layers=1, heads=4, kv_heads=2, feed_forward=256, context=64)
TRAIN = TrainSettings(model=MODEL, batch=2, steps=2, warmup=1)
MULTIPLE_CHOICE = MultipleChoiceSettings(
    windows=3, context=64, questions=2, first=16, stride=24, continuation=4, batch=3
)


@cache
def corpus():
    documents = []
    for number in range(60):
        lines = (f"def f{number}_{line}(x):\n    return x + {line * number}\n" for line in range(12))
        documents.append(Document(f"part{number % 4}/file{number}.py", "".join(lines).encode()))
    return Corpus("made", "1", tuple(sorted(documents, key=lambda document: document.path)))


@cache
def untrained():
    torch.manual_seed(0)
    model = LanguageModel(MODEL).eval().requires_grad_(False)
    return Trained(model, "untrained", {"key": "untrained"})


class TinySettings(Settings):
    """Settings whose model is not trained: experiments that only measure need none better."""

    @property
    def trained(self):
        return untrained()


def settings(folder, schemes=("mxfp4", "int4_g32_asymmetric")):
    return TinySettings(
        scale="quick",
        device="cpu",
        cache=folder,
        train=TRAIN,
        multiple_choice=MULTIPLE_CHOICE,
        schemes=tuple(schemes),
        shape=(256, 256),
        text=corpus(),
    )


__all__ = ["MODEL", "MULTIPLE_CHOICE", "TRAIN", "corpus", "replace", "settings"]
