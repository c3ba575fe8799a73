"""A call that was killed goes on behind its finished blocks, and ends with the bits of one that was not."""

import copy
import signal

import pytest
import torch
from torch import nn

from ao_lab import Int8StaticActivationInt8WeightConfig, PerTensor, SchemeConfig, quantize_
from ao_lab.calibration.methods import AWQ, GPTQ, BiasCorrection, Clip
from ao_lab.calibration.statistics import MovingAverage
from tests.ao_lab.calibration.test_run import INT4, assert_same, inputs, stack, weights
from tests.support.runs import forks

GIVEN = {"methods": (AWQ(ratios=4), Clip(), GPTQ(), BiasCorrection())}


def stopping(at):
    def stop(name, done, total):
        if done == at:
            raise KeyboardInterrupt

    return stop


def run(model, folder, config=INT4, **options):
    return quantize_(model, config, calibration=inputs(), resume=folder, **{**GIVEN, **options})


@pytest.mark.parametrize("at", [1, 3, 5, 7, 9])
def test_a_killed_call_goes_on_with_the_same_bits(tmp_path, at):
    """Wherever it was killed; blocks that it had finished are not quantized again."""
    whole, killed, again = (stack(blocks=3) for _ in range(3))
    report = run(whole, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(killed, tmp_path / "killed", progress=stopping(at))
    assert len(list((tmp_path / "killed").iterdir())) == (at - 1) // 3
    told = run(again, tmp_path / "killed")
    assert_same(again, whole)
    assert str(told) == str(report)
    assert [layer.calibrated for layer in told.layers] == [layer.calibrated for layer in report.layers]
    assert len(list((tmp_path / "killed").glob("block-*.pt"))) == 3


KILLED = """
import os, signal, sys
from tests.ao_lab.calibration.test_resume import run, stack

def kill(name, done, total):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

run(stack(blocks=3), sys.argv[1], progress=kill, device=None if sys.argv[2] == "resident" else "cpu")
"""


@pytest.mark.parametrize("how", ["resident", pytest.param("streamed", marks=pytest.mark.nightly)])
def test_a_process_that_is_killed_in_a_block_goes_on_with_the_same_bits(tmp_path, how):
    """By SIGKILL, between two weights of the second block."""
    done = forks.python("-c", KILLED, tmp_path, how)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert [file.name for file in tmp_path.iterdir()] == ["block-0000.pt"]
    whole, again = stack(blocks=3), stack(blocks=3)
    run(again, tmp_path, device=None if how == "resident" else "cpu")
    quantize_(whole, INT4, calibration=inputs(), **GIVEN)
    assert_same(again, whole)


def test_finished_blocks_are_read_and_nothing_is_computed(tmp_path, monkeypatch):
    from ao_lab.calibration.run import Job

    whole, again = stack(), stack()
    run(whole, tmp_path)
    monkeypatch.setattr(Job, "quantize_block", None)
    run(again, tmp_path)
    assert_same(again, whole)


def test_static_scales_are_kept(tmp_path):
    whole, again = stack(), stack()
    config = Int8StaticActivationInt8WeightConfig(granularity=PerTensor())
    given = {"config": config, "filter_fn": lambda m, n: n.startswith("blocks") and hasattr(m, "in_features")}
    run(whole, tmp_path, **given, methods=(Clip(),))
    run(again, tmp_path, **given, methods=(Clip(),))
    assert_same(again, whole)
    assert weights(again)["blocks.0.one.weight"].input_scale is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"methods": (Clip(),)}, "methods differ"),
        ({"config": SchemeConfig(scheme="int3_g32")}, "weights to be quantized, and their schemes differ"),
        ({"filter_fn": lambda m, n: n.endswith("one")}, "weights to be quantized, and their schemes differ"),
    ],
)  # fmt: skip
def test_blocks_of_another_call_are_refused(tmp_path, change, said):
    run(stack(), tmp_path)
    model = stack()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=f"block-0000.pt belongs to another call: {said}"):
        run(model, tmp_path, **change)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_other_data_and_other_weights_are_refused(tmp_path):
    run(stack(), tmp_path)
    with pytest.raises(ValueError, match="another call: data differ"):
        quantize_(stack(), INT4, calibration=inputs(seed=3), resume=tmp_path, **GIVEN)
    with pytest.raises(ValueError, match="another call: weights differ"):
        run(stack(seed=5), tmp_path)


def test_what_stays_dense_in_a_block_is_part_of_the_key(tmp_path):
    """A norm's gain decides the inputs of the layers behind it."""
    run(stack(), tmp_path)
    model = stack()
    model.blocks[1].norm.weight.data *= 2
    with pytest.raises(ValueError, match="another call: weights differ"):
        run(model, tmp_path)


def test_weights_that_were_quantized_before_are_part_of_the_key(tmp_path):
    given = {"filter_fn": lambda m, n: n.endswith("one"), "methods": (GPTQ(),)}
    for times in (1, 1, 2):
        model = stack()
        model.blocks[0].two.weight.data *= times
        quantize_(model, INT4, lambda m, n: n.endswith("two"))
        if times == 1:
            run(model, tmp_path, **given)
    with pytest.raises(ValueError, match="another call: weights differ"):
        run(model, tmp_path, **given)


class Scaled(nn.Module):
    """Blocks that are given a tensor in a mapping, beside their input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Factor() for _ in range(2))

    def forward(self, x, factor):
        for block in self.blocks:
            x = block(x, given={"factor": factor})
        return x


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(32, 32)

    def forward(self, x, given):
        return self.one(x * given["factor"])


def test_other_arguments_of_blocks_are_part_of_the_key(tmp_path):
    """Positions, for instance, which the first block's input does not show."""
    x = torch.randn(8, 16, 32)
    for factor in (1.0, 1.0):
        batches = [{"x": x, "factor": torch.tensor(factor)}]
        quantize_(Scaled(), INT4, calibration=batches, methods=(GPTQ(),), resume=tmp_path)
    batches = [{"x": x, "factor": torch.tensor(3.0)}]
    with pytest.raises(ValueError, match="another call: data differ"):
        quantize_(Scaled(), INT4, calibration=batches, methods=(GPTQ(),), resume=tmp_path)


@pytest.mark.parametrize(
    "other", [{"statistic": "percentile"}, {"statistic": lambda: MovingAverage(0.5)}, {"act_quant_scale": torch.tensor(0.5)}]
)  # fmt: skip
def test_what_finds_static_scales_is_part_of_the_key(tmp_path, other):
    given = {
        "filter_fn": lambda m, n: n.startswith("blocks") and hasattr(m, "in_features"),
        "methods": (Clip(),),
    }
    first = {"statistic": MovingAverage} if callable(other.get("statistic")) else {}
    run(stack(), tmp_path, Int8StaticActivationInt8WeightConfig(granularity=PerTensor(), **first), **given)
    config = Int8StaticActivationInt8WeightConfig(granularity=PerTensor(), **other)
    with pytest.raises(ValueError, match="another call: weights to be quantized, and their schemes differ"):
        run(stack(), tmp_path, config, **given)


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "block-0000.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"block-0000.pt cannot be read"):
        run(stack(), tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file; give the name of a folder"):
        run(stack(), file)
    with pytest.raises(ValueError, match="give calibration too"):
        quantize_(stack(), INT4, methods=(Clip("none"),), resume=tmp_path)


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(content, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    model = stack()
    with pytest.raises(OSError, match="No space") as caught:
        run(model, tmp_path)
    assert not list(tmp_path.iterdir())
    assert "stopped with 3 of 7" in caught.value.__notes__[0]
