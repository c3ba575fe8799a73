"""Calibration by several processes: the bits of one process with as many shares of the data."""

import pytest
import torch

from ao_lab import quantize_
from ao_lab.calibration.methods import GPTQ
from ao_lab.calibration.ranks import DistributedBatches, Ranks
from ao_lab.calibration.tokens import Moments
from tests.ao_lab.calibration.test_run import INT4, assert_same, inputs, stack
from tests.support.distributed.ranks import check_on_ranks


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, ("experts",)),
        pytest.param(2, ("static",), marks=pytest.mark.nightly),
        pytest.param(4, ("weights", "inputs", "experts"), marks=pytest.mark.nightly),
    ],
)
def test_ranks_have_the_bits_of_one_process(tmp_path, ranks, cases):
    check_on_ranks("calibration.same_bits", tmp_path, *cases, ranks=ranks)


def test_errors_are_those_of_all_ranks(tmp_path):
    check_on_ranks("calibration.refusals", tmp_path)


def test_sums_of_shares_are_a_tree():
    """Of four leaves (a + b) + (c + d), whatever is empty."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(5, 3, dtype=torch.float64, generator=generator) * 10.0**i for i in range(4)]
    sums = Moments()
    for part in x:
        sums.update(part)
        sums.close()
    ((size, whole),) = sums.closed
    leaves = [of(part).value for part in x]
    assert size == 4
    assert torch.equal(whole.value, (leaves[0] + leaves[1]) + (leaves[2] + leaves[3]))
    assert not torch.equal(whole.value, ((leaves[0] + leaves[1]) + leaves[2]) + leaves[3])
    assert whole.count == 20
    assert torch.equal(whole.largest, torch.cat(x).abs().amax(0))
    sums = Moments()
    for part in (None, x[0], None, None):
        if part is not None:
            sums.update(part)
        sums.close()
    assert torch.equal(sums.closed[0][1].value, leaves[0])


def of(x):
    moments = Moments()
    moments.update(x)
    return moments


def test_one_share_is_a_list_of_batches():
    """And more shares give other bits, of which the record of finished blocks knows."""
    one, two, more = stack(), stack(), stack()
    quantize_(one, INT4, calibration=inputs(4), methods=(GPTQ(),))
    quantize_(two, INT4, calibration=DistributedBatches(inputs(4)), methods=(GPTQ(),))
    assert_same(one, two)
    quantize_(more, INT4, calibration=DistributedBatches(inputs(4), shares=4), methods=(GPTQ(),))
    assert Ranks.of(inputs(4)) is None
    with pytest.raises(TypeError, match=r"holds an iterable of batches, .* got NoneType"):
        DistributedBatches(None)
    assert Ranks(8, 1, 4).share_of(3, 4) == 1


def test_shares_are_part_of_the_key(tmp_path):
    quantize_(stack(), INT4, calibration=DistributedBatches(inputs(4), 2), methods=(GPTQ(),), resume=tmp_path)
    batches = DistributedBatches(inputs(4), 4)
    with pytest.raises(ValueError, match="another call: shares of the data differ"):
        quantize_(stack(), INT4, calibration=batches, methods=(GPTQ(),), resume=tmp_path)
    with pytest.raises(ValueError, match="a multiple of its 4 shares; got"):
        quantize_(stack(), INT4, calibration=DistributedBatches(inputs(3), 4), methods=(GPTQ(),))
