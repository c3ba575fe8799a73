"""Where rows stand, without a look at offsets on the host: every place of every split."""

import itertools

import pytest
import torch

from ao_lab.training.grouped.layout import layout_of
from fast.layers.gather import gather_transposed
from reference.training.grouped import padded_rows


def expected(ends, rows, step):
    """Sources of the padded places, and the group of each row and of each `step` places."""
    source, of_chunks = [], []
    for expert, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        mine = list(range(start, end))
        mine += [-1] * (-len(mine) % step)
        source += mine
        of_chunks += [expert] * (len(mine) // step)
    count = padded_rows(rows, len(ends), step)
    of_rows = [next((e for e, end in enumerate(ends) if row < end), len(ends)) for row in range(rows)]
    return (
        source + [-1] * (count - len(source)),
        of_rows,
        of_chunks + [len(ends)] * (count // step - len(of_chunks)),
    )


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("experts", [1, 2, 3])
def test_every_split_of_six_rows(experts, step):
    for ends in itertools.combinations_with_replacement(range(7), experts):
        layout = layout_of(torch.tensor(ends, dtype=torch.int32), 6, step)
        found = [t.tolist() for t in (layout.source, layout.of_rows(), layout.of_chunks())]
        assert found == list(expected(ends, 6, step)), ends
        assert layout.ends.dtype == layout.source.dtype == torch.int32


@pytest.mark.parametrize("step", [16, 48])
def test_owners_of_sixteen_places(step):
    for ends in ((0, 7, 40), (40, 40, 40), (0, 0, 0), (16, 32, 33)):
        layout = layout_of(torch.tensor(ends, dtype=torch.int32), 40, step)
        chunks = expected(ends, 40, step)[2]
        assert layout.owners.tolist() == [owner for owner in chunks for _ in range(step // 16)]
        assert layout.owners.dtype == torch.int32


def test_nothing_moves_where_nothing_is_filled_up():
    x = torch.randn(6, 3)
    layout = layout_of(torch.tensor([2, 6], dtype=torch.int32), 6, 1)
    assert layout.columns(x).data_ptr() == x.data_ptr()
    assert layout.of_rows().tolist() == [0, 0, 1, 1, 1, 1]


def test_columns_of_rows_that_are_left_out_are_zeros():
    x = torch.tensor([[float("nan"), float("inf")], [1.0, 2], [3, 4]])
    found = gather_transposed(x, torch.tensor([2, -1, 1, -1], dtype=torch.int32))
    assert torch.equal(found, torch.tensor([[3.0, 0, 1, 0], [4, 0, 2, 0]]))
    assert not gather_transposed(x[:0], torch.tensor([-1, -1], dtype=torch.int32)).any()
