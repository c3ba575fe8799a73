"""Each function in each mode of JAX: the bits of a plain call. Meshes have four devices, in a process of their own.

`tests/ao_lab/jax/modes.py` has the functions and modes; a few run by day, all of them by night.
"""

import pytest

from tests.support.runs.forks import python

pytest.importorskip("jax")

from tests.ao_lab.jax import modes as jax_modes

MESHES = [mode for mode in jax_modes.MODES if "mesh" in mode]
#: By day: modes here, and functions in them.
HERE = [
    ("encode", "strict"), ("decode", "x64"), ("choose_scales", "strict"), ("choose_scales", "x64"),
    ("choose_scales", "rank"), ("matmul", "strict"),
]  # fmt: skip
ON_MESHES = ["decode", "fake_quantize fp8_rowwise", "dot_general"]


@pytest.mark.parametrize(("name", "mode"), HERE)
def test_mode(name, mode):
    assert jax_modes.wrong(name, mode) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("mode", [mode for mode in jax_modes.MODES if mode not in MESHES])
def test_every_function_in_every_mode(mode, part):
    """A quarter of them a test: a mode that compiles each takes a minute and a half."""
    names = [*jax_modes.FUNCTIONS, *(name for name in jax_modes.SCHEMES if "gradient" in name)][part::4]
    # Step by step a product takes minutes.
    slow = {"dot_general seed", "dot_general integer", "quantize_both"} if mode == "disable_jit" else set()
    found = {name: jax_modes.wrong(name, mode) for name in names if name not in slow}
    assert {name: reason for name, reason in found.items() if reason} == {}


def on_meshes(names, modes):
    """What fails on four devices, as lines; the last one says how many pairs ran."""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = python("-m", "tests.ao_lab.jax.modes", *names, "@", *modes, env=environment, timeout=3000)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_functions_on_an_explicit_mesh():
    assert on_meshes(ON_MESHES, ["explicit mesh"]) == [f"{len(ON_MESHES)} pairs"]


@pytest.mark.nightly
def test_every_function_on_every_mesh():
    assert on_meshes([], MESHES) == [f"{len(jax_modes.ALL) * len(MESHES)} pairs"]
