"""What a choice goes by, of times of the host and of the GPU."""

import pytest
import torch

from ao_lab.tuning.measure import HOST_MARGIN, _timing

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("host", "launches", "seconds"),
    [
        (1e-4, "eager", 3e-4), (1.9e-4, "eager", 3e-4), (2.1e-4, "eager", 2.1e-4 * HOST_MARGIN), (4e-4, "eager", 6e-4),
        (4e-4, "graph", 3e-4),
    ],
)  # fmt: skip
def test_a_choice_for_eager_mode_bears_a_busy_host(host, launches, seconds):
    """Host times are of an idle machine: they count with a margin; of a graph they count not at all."""
    made = _timing([3e-4] * 5, host, GPU, launches)
    assert made.seconds == pytest.approx(seconds, rel=1e-12)
    assert (made.host, made.gpu) == (host, 3e-4)
