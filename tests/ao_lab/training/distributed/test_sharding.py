"""Training in low precision on several ranks of this machine gives the bits of one process."""

import pytest

from tests.support.distributed.ranks import check_on_ranks, run_on_ranks

CHECKPOINTS = "training/checkpoint_ranks.py"


def test_fsdp():
    """Codes or values gathered, uneven shards, accumulation, recomputation, mixed precision; bytes and reductions counted."""
    check_on_ranks("training/fsdp_ranks.py")


@pytest.mark.parametrize(
    "recipe",
    [
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("tensorwise", "rowwise", "mxfp8", "steps")
        ),
    ],
)
def test_fsdp_compiled(recipe):
    check_on_ranks("training/fsdp_ranks.py", recipe)


def test_tensor_parallelism():
    """Operands are parts of those of one process, bit for bit."""
    check_on_ranks("training/tensor_parallel_ranks.py")


@pytest.mark.nightly
def test_tensor_parallelism_beside_fsdp():
    """Four ranks, two by two."""
    check_on_ranks("training/two_dimensions_ranks.py", ranks=4)


@pytest.mark.parametrize(
    "place", [pytest.param(one, marks=pytest.mark.nightly) for one in ("backward", "save")]
)
def test_a_rank_that_dies_leaves_a_checkpoint(place, tmp_path):
    """It loads, also into layers of other kinds, and training goes on as if nothing had been."""
    killed = run_on_ranks(CHECKPOINTS, tmp_path, place, 2)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    assert len(list(tmp_path.glob("step_*/.metadata"))) == (2 if place == "backward" else 1)
    check_on_ranks(CHECKPOINTS, tmp_path)
