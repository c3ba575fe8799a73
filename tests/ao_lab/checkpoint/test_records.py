"""Records of weights: each tensor of a folder belongs to one of them."""

from dataclasses import replace

import pytest
from torch import nn

import ao_lab
from ao_lab.checkpoint.formats import completed
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.checkpoint.records import Records, dense_names, read_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two quantized layers, saved."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
    path = tmp_path_factory.mktemp("records") / "model"
    ao_lab.save_pretrained(model, path)
    return path


def test_two_weights_of_one_tensor(folder):
    """Refused of this library's folders, and of others'."""
    opened = look_at(folder)
    records = read_records(opened)
    assert set(dense_names(records.weights, opened)) == {"0.bias", "1.bias"}
    first, second = records.weights["0.weight"], records.weights["1.weight"]
    part, full = next(iter(first.names.items()))
    both = {"0.weight": first, "1.weight": replace(second, names={**second.names, part: full})}
    said = f"1.weight and 0.weight are both made of {full}; fetch it again"
    with pytest.raises(ValueError, match=said):
        dense_names(both, opened)
    with pytest.raises(ValueError, match=said):
        completed(Records(both, (), {}), opened)
    left = replace(records, left_out={full: "not needed"})
    with pytest.raises(ValueError, match=f"0.weight and what is left out are both made of {full}"):
        completed(left, opened)
