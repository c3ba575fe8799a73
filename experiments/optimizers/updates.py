"""Updates of AdamW with stored states beside those with float32 states, on the same gradients: ours, and torchao's own code.

A block of 256 gradients has one that is larger than the others by a ratio. Gradients are normal, and in half of the settings
all but the large ones are 0 from step 40 on, as those of rare rows of an embedding are. Every method starts from zeros with a
learning rate of 1, and its updates of 50 steps from the eleventh on are compared: the largest over the largest with float32
states, the root of the mean square of the difference over that of the float32 update, and the projection on it.

torchao's functions (`single_param_adam` on its `OptimState8bit`, `OptimStateFp8`, `OptimState4bit`) run as they are,
uncompiled. bitsandbytes stores what torchao's 8-bit states store, by the same map. FlashOptim's formula is `flashoptim.8bit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.harness.measuring import Values
from reference.optim.states import Floats, States, states_of
from reference.optim.update import Key, begin, update

KIND = "updates"
LARGEST, RMS, PROJECTION = "largest update over float32's", "rms difference", "projection"
RATIOS = (1, 10, 100, 1_000, 10_000, 100_000)
BLOCKS, BLOCK = 4, 256
STEPS, FIRST, STOP = 60, 11, 40
BETAS, EPS = (0.9, 0.999), 1e-8
#: Methods by name: states of ours, or a class of torchao's.
OURS = {"ours, 8 bits": "8bit", "ours, 4 bits": "4bit", "FlashOptim's formula, 8 bits": "flashoptim.8bit"}
THEIRS = {
    "torchao, 8 bits": "OptimState8bit",
    "torchao, FP8": "OptimStateFp8",
    "torchao, 4 bits": "OptimState4bit",
}
METHODS = (*THEIRS, *OURS)
#: Makes the updates of one step of its gradients, float32 (blocks, 256).
Stepper = Callable[[int, Floats], Floats]


@dataclass(frozen=True)
class Setting:
    """A ratio of gradients in a block, and whether the small ones stop."""

    ratio: int
    stops: bool
    #: How many steps there are, and the first that counts.
    steps: int = STEPS
    first: int = FIRST

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"ratio {self.ratio}" + (", small gradients become 0" if self.stops else "")

    def gradients(self, seed: int) -> list[Floats]:
        """Of all steps."""
        rng = np.random.default_rng(seed)
        size = np.full((BLOCKS, BLOCK), 1 / self.ratio, np.float32)
        size[:, 0] = 1
        result = [(rng.standard_normal(size.shape) * size).astype(np.float32) for _ in range(self.steps)]
        for g in result[STOP if self.stops else self.steps :]:
            g[:, 1:] = 0
        return result


SETTINGS = tuple(Setting(ratio, stops) for stops in (False, True) for ratio in RATIOS)


def stored_states(name: str | States, seed: int) -> Stepper:
    """Updates of the reference with states of a name, or of a record."""
    states = states_of(name)
    held = begin(np.zeros((BLOCKS, BLOCK), np.float32), states)

    def step(number: int, g: Floats) -> Floats:
        nonlocal held
        before = held.p
        held = update(held, g, states, step=number, lr=1.0, betas=BETAS, eps=EPS, key=Key(seed))
        return np.asarray(before - held.p)

    return step


def torchao_states(name: str) -> Stepper:
    """Updates of torchao's own functions."""
    import torchao.optim.adam as adam
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    shape = (BLOCKS, BLOCK)
    zeros: dict[str, Callable[[bool], Any]] = {
        "OptimState8bit": lambda signed: subclass_8bit.OptimState8bit.zeros(shape, signed, 256),
        "OptimState4bit": lambda signed: subclass_4bit.OptimState4bit.zeros(shape, signed, 128),
        "OptimStateFp8": lambda signed: subclass_fp8.OptimStateFp8.zeros(shape, 256),
    }
    p = torch.zeros(shape)
    first, second = zeros[name](True), zeros[name](False)
    rate = torch.tensor(1.0)

    def step(number: int, g: Floats) -> Floats:
        before = p.clone()
        adam.single_param_adam(
            p, torch.from_numpy(g), torch.tensor(float(number)), first, second, None, rate, *BETAS, 0.0, EPS, True, False
        )  # fmt: skip
        return difference(before, p)

    return step


def difference(before: Tensor, after: Tensor) -> Floats:
    """What a step took away."""
    return np.asarray((before - after).numpy())


def stepper(method: str, seed: int) -> Stepper:
    """The steps of a method."""
    return stored_states(OURS[method], seed) if method in OURS else torchao_states(THEIRS[method])


def missing(method: str) -> str | None:
    """Why a method cannot run here; None where it can."""
    if method in OURS:
        return None
    from experiments.harness.revision import TORCHAO
    from experiments.harness.revision import missing as lacks

    return lacks(TORCHAO)


def measure(setting: Setting, method: str, seed: int) -> Values:
    """The three numbers of a method."""
    return compared(setting, stepper(method, seed), seed)


def compared(setting: Setting, mine: Stepper, seed: int) -> Values:
    """The three numbers of a method's updates of the same gradients."""
    exact = stored_states("float32", seed)
    largest = [0.0, 0.0]
    sums = np.zeros(3)
    for number, g in enumerate(setting.gradients(seed), 1):
        taken, wanted = mine(number, g).astype(np.float64), exact(number, g).astype(np.float64)
        if number >= setting.first:
            largest = [
                max(before, float(np.abs(x).max()))
                for before, x in zip(largest, (taken, wanted), strict=True)
            ]
            sums += (np.square(taken - wanted).sum(), np.square(wanted).sum(), (taken * wanted).sum())
    return {
        LARGEST: (largest[0] / largest[1], "x"),
        RMS: (float(np.sqrt(sums[0] / sums[1])), "x"),
        PROJECTION: (float(sums[2] / sums[1]), "x"),
    }
