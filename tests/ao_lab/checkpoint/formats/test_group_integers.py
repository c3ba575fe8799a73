"""Groups of columns that lie apart, as runs of neighbours."""

from __future__ import annotations

import pytest
import torch

from ao_lab.checkpoint.formats.group_integers import regrouped, run_length


@pytest.mark.parametrize(
    ("g_idx", "groups", "length"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 2, 4),
        ([1, 1, 1, 1, 0, 0, 0, 0], 2, 4),
        ([0, 0, 1, 1, 0, 0, 1, 1], 2, 2),
        ([0, 1, 1, 0, 0, 1, 0, 1], 2, 1),
        ([0, 0, 0, 1, 1, 1, 0, 0], 2, 1),
        ([0] * 8, 1, 8),
        ([0], 1, 1),
    ],
)
def test_runs_of_one_group(g_idx, groups, length):
    columns = torch.tensor(g_idx)
    assert run_length(columns, groups) == length
    scale = torch.arange(3.0 * groups).reshape(3, groups)
    (made,) = regrouped(columns, length, scale)
    assert torch.equal(made.repeat_interleave(length, -1), scale[:, columns])


@pytest.mark.parametrize("g_idx", [[0, 2], [-1, 0], [], [[0, 1]], [0.0, 1.0]])
def test_what_names_no_groups(g_idx):
    with pytest.raises(ValueError, match="g_idx"):
        run_length(torch.tensor(g_idx), 2)
