"""Indices, masks and passes of the kernels, in Triton's interpreter; `interpreted_kernels` says what is compared."""

import platform

import pytest

from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

# Groups, each as many lines as it has cases, and what has to have answered in them.
GROUPS = {
    "fp8": (33, {"gradient"}),
    "mx": (39, {"gradient", "packed", "tiled"}),
    "integers": (52, {"gradient", "packed"}),
    "two levels": (20, {"gradient", "packed", "outer", "tiled"}),
    "formats": (21, {"stochastic", "packed"}),
    "both": (27, {"both", "layouts"}),
}


# Groups that share a process, which takes five seconds to begin.
TOGETHER = (("fp8", "mx", "both"), ("integers", "two levels", "formats"))


@pytest.mark.parametrize("groups", TOGETHER, ids="-".join)
def test_kernels_agree_with_the_reference(groups):
    """Triton is required here, on any machine: it is among what `make test` installs."""
    lines = lines_of("tests/emulator/programs/kernels.py", ",".join(groups))
    assert len(lines) == sum(GROUPS[group][0] for group in groups)
    for group in groups:
        cases, answered = GROUPS[group]
        mine, lines = lines[:cases], lines[cases:]
        assert answered <= set(" ".join(mine).split())


@pytest.mark.parametrize(("part", "cases"), [("day", 19), pytest.param("", 25, marks=pytest.mark.nightly)])
def test_scales_of_scales_agree_with_the_reference(part, cases):
    assert len(lines_of("tests/emulator/programs/second_level.py", *part.split())) == cases


@pytest.mark.parametrize(("part", "cases"), [("day", 22), pytest.param("", 35, marks=pytest.mark.nightly)])
def test_gradients_agree_with_the_reference(part, cases):
    assert len(lines_of("tests/emulator/programs/gradients.py", *part.split())) == cases


@pytest.mark.parametrize(("part", "cases"), [("day", 23), pytest.param("", 42, marks=pytest.mark.nightly)])
def test_products_agree_with_exact_ones(part, cases):
    assert len(lines_of("tests/emulator/programs/linear.py", *part.split())) == cases


def test_tokens_sorted_by_expert_and_blocks_that_are_mixed():
    assert len(lines_of("tests/emulator/programs/grouped.py")) == 6 + 5
