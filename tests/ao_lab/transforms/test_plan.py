"""What a transform does for a class of configurations, and how weights are changed: all or none, with a note of how far."""

from dataclasses import dataclass

import pytest
from torch import nn

import ao_lab
from ao_lab import SparseTrainingConfig, SparsityReport, sparsify_
from ao_lab.sparsity.plan import TRANSFORMS
from ao_lab.transforms.plan import all_or_none, noting


@dataclass(frozen=True)
class Mine:
    pass


@dataclass(frozen=True)
class Finer(Mine):
    pass


def test_a_configuration_of_ones_own():
    calls = []

    @TRANSFORMS.register(Mine)
    def do(*call):
        calls.append(call)
        return SparsityReport()

    layer, keep = nn.Linear(4, 4), lambda module, name: True
    for config in (Mine(), Finer()):
        assert sparsify_(layer, config, keep, calibration=[], offload=True) == SparsityReport()
        assert calls[-1] == (layer, config, keep, ("calibration", "offload"))
    TRANSFORMS.register(Mine)(do)
    with pytest.raises(ValueError, match="Mine has a transform already"):
        TRANSFORMS.register(Mine)(lambda *call: SparsityReport())


def test_training_is_one():
    assert len(sparsify_(nn.Linear(4, 4), SparseTrainingConfig()).changed) == 1


def test_after_an_error_what_was_begun_is_restored():
    restored = []

    def changes():
        with noting(lambda: "1 of 2"), all_or_none(restored.append) as begun:
            begun.append("first")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        changes()
    assert (restored, caught.value.__notes__) == (["first"], ["1 of 2"])


def test_names_that_match_nothing_are_answered_with_those_most_like_them():
    model = nn.ModuleDict({"down_proj": nn.Linear(32, 32), "up_proj": nn.Linear(32, 32)})
    rounded = ao_lab.SchemeConfig(scheme="int8_rowwise")
    with pytest.raises(ValueError, match="'down_projj' match nothing; similar names are down_proj"):
        ao_lab.quantize_(model, ao_lab.FqnToConfig({"down_projj": rounded}))
    with pytest.raises(ValueError, match="'head' match nothing; names are down_proj, up_proj"):
        ao_lab.quantize_(model, ao_lab.FqnToConfig({"head": rounded}))


def test_a_filter_with_swapped_arguments_is_told_how_it_is_called():
    with pytest.raises(TypeError) as caught:
        ao_lab.quantize_(
            nn.Sequential(nn.Linear(32, 32)),
            ao_lab.SchemeConfig(scheme="int8_rowwise"),
            lambda name, module: "0" in name,
        )
    assert "called as filter_fn(module, name)" in "".join(caught.value.__notes__)
