"""The optimizer kernel: its bits in Triton's interpreter, and what it compiles to for Hopper."""

import platform
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reference.optim.states import STATES
from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.optim import host
from fast.kernels.optim.records import Kind, Rule
from tests.fast.kernels.compiling.kernel_compiler import launched_together


def test_bits_in_the_interpreter():
    """Whole blocks and short ones, roots, both halves of random words, 4 bits; an empty shard, whose steps are counted."""
    assert len(lines_of("optim", "few")) == 4


def test_bits_of_what_a_gpu_runs():
    """Its instructions emulated: nibbles in words, conversions, roots."""
    assert len(lines_of("optim", "hardware")) == 5


@pytest.mark.nightly
def test_bits_of_every_case_in_the_interpreter():
    assert len(lines_of("optim")) == 13


def test_steps_are_launched_on_the_device_of_their_parameters(monkeypatch):
    inside, launched = [], []

    @contextmanager
    def entered(device):
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(host, "kind_of", lambda slot, rule: "kind")
    monkeypatch.setattr(host.Launches, "_launch", lambda *_: launched.append(list(inside)))
    slots = [SimpleNamespace(p=SimpleNamespace(device=i, get_device=lambda i=i: i)) for i in (0, 1, 0)]
    host.Launches().update(slots, None)
    assert launched == [[0], [1]]


def step_of(states, master=0, rounds=False, block=None):
    """A launch of the kernel for bfloat16 parameters."""
    record = STATES[states] if block is None else STATES[states].with_block(block)
    kind = Kind("adamw", torch.bfloat16, torch.bfloat16, record.first, record.second, rounds, master, False, True,
                     record.second.least > 0)  # fmt: skip

    def run():
        tables, plan = host.Tables(torch.device("cpu")), host.plan_of(kind)
        tables.put(np.array([[0] * 8 + [16, 16 * kind.size, 16, 0, 0]], np.int64), host.blocks_of(plan, kind))
        host.launch_numbers(
            "adamw", tables, torch.zeros(4, dtype=torch.float64), torch.zeros(1), torch.zeros(1)
        )
        host.launch_step(kind, tables, plan)
        return True

    return run


#: Instructions an element, what a program does once among them: copies of the first tiles, of 8 to 16. At the memory's speed
#: there are about 80 slots.
LIMITS = {("8bit", 0, True): 76, ("8bit", 8, False): 86, ("4bit", 0, False): 98}


def test_the_kernel_moves_whole_words_and_spills_nothing():
    """Elements in 16 and 8 bytes, random words where they are drawn: scales alone are exchanged; no call for rare exponents."""
    made = launched_together([step_of(*case) for case in LIMITS])
    for (numbers, step), limit in zip(made, LIMITS.values(), strict=True):
        assert numbers.kernel == "numbers_kernel"
        assert {name.split()[0] for name in ("sqrt.rn.f64", "div.rn.f64") if name in numbers.ptx} == {
            "sqrt.rn.f64",
            "div.rn.f64",
        }
        assert (step.local, step.stack) == (0, 0)
        assert step.named("CALL") == 0
        assert step.count() / step.elements <= limit
        # Scales alone pass through shared memory, and single bytes are neither read nor written.
        assert step.named("STS") <= 2
        assert not {1, 2} & (set(step.accesses("LDG")) | set(step.accesses("STG")))


def test_tiles_cover_every_block_once():
    tiles = host.tiles_of(np.array([5, 0, 1, 8]), 4)
    assert tiles.tolist() == [[0, 0], [0, 4], [2, 0], [3, 0], [3, 4]]


@pytest.mark.parametrize(
    ("states", "b2", "ordinary"),
    [("8bit", 0.999, True), ("8bit", 0.5, True), ("8bit", 0.49, False), ("4bit", 2.0**-13, True),
     ("4bit", 2.0**-14, False), ("flashoptim.8bit", 0.999, False), ("float32", 0.999, False)],
)  # fmt: skip
def test_roots_are_tested_for_rare_exponents_where_they_can_be(states, b2, ordinary):
    """Of 8 bits the smallest root is 2**-44 * 2**-6, of 4 bits 2**-44; a second moment may not be below 2**-101."""
    rule = Rule("adamw", STATES[states], 1e-3, (0.9, b2), 1e-8, 0.0)
    assert host.is_ordinary(rule) is ordinary
