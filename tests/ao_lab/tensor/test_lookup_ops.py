"""Embedding bags of quantized tables: nn.EmbeddingBag after `quantize_`, `ao_lab.embedding_bag`, and what they refuse."""

import pytest
import torch
from torch import nn

import ao_lab
import reference


def bags(module, name):
    return isinstance(module, nn.EmbeddingBag)


def pair(scheme="int8_rowwise", dtype=torch.float32, **options):
    """An embedding bag, quantized, and a dense one of the values that are stored."""
    torch.manual_seed(0)
    ours = nn.EmbeddingBag(40, 64, dtype=dtype, **options)
    ao_lab.quantize_(ours, ao_lab.SchemeConfig(scheme=scheme), bags)
    dense = nn.EmbeddingBag(40, 64, dtype=dtype, **options)
    dense.weight.data = ours.weight.dequantize()
    return ours, dense


IDS, OFFSETS = torch.arange(60) * 7 % 40, torch.tensor([0, 5, 5, 33])


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32_asymmetric", "fp8_rowwise", "nf4"])
@pytest.mark.parametrize(
    "options",
    [{"mode": "sum"}, {"mode": "mean"}, {"mode": "mean", "padding_idx": 3}, {"mode": "max"}, {"include_last_offset": True}],
)  # fmt: skip
def test_torchs_module_gives_the_sums_of_the_stored_rows(scheme, options):
    """Sums of 28 rows in another order differ by a few last bits at most."""
    ours, dense = pair(scheme, **options)
    offsets = torch.cat([OFFSETS, torch.tensor([60])]) if "include_last_offset" in options else OFFSETS
    torch.testing.assert_close(ours(IDS, offsets), dense(IDS, offsets), rtol=0, atol=32 * 2.0**-24 * 32)
    assert not ours.weight.requires_grad
    assert str(ours).endswith(f"weight={scheme})")


def test_weights_matrices_of_ids_and_programs():
    ours, dense = pair(mode="sum")
    weights = torch.rand(60)
    torch.testing.assert_close(ours(IDS, OFFSETS, weights), dense(IDS, OFFSETS, weights))
    torch.testing.assert_close(ours(IDS.reshape(12, 5)), dense(IDS.reshape(12, 5)))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert compiled(IDS, OFFSETS, weights).equal(ours(IDS, OFFSETS, weights))


def test_the_function_has_the_bits_of_the_reference():
    ours, _ = pair(dtype=torch.bfloat16)
    y = ao_lab.embedding_bag(ours.weight, IDS, OFFSETS, mode="mean", padding=7, features=2)
    expected = reference.embedding_bag(
        ours.weight.stored, IDS, OFFSETS, mode="mean", padding=7, dtype="bfloat16"
    )
    assert y.dtype == torch.bfloat16
    assert y.equal(expected)


def test_ids_outside_of_the_table():
    ours, _ = pair()
    for call in (ours, lambda ids, offsets: ao_lab.embedding_bag(ours.weight, ids, offsets)):
        with pytest.raises(ValueError, match="id 40 at place 1 is outside of a table of 40 rows"):
            call(torch.tensor([0, 40]), torch.tensor([0]))


def test_what_has_no_gradient_or_is_no_table():
    ours, dense = pair()
    weights = torch.rand(60, requires_grad=True)
    with pytest.raises(ValueError, match=r"give weights\.detach"):
        ao_lab.embedding_bag(ours.weight, IDS, OFFSETS, weights)
    with pytest.raises(TypeError, match="takes a QuantizedTensor, got Parameter"):
        ao_lab.embedding_bag(dense.weight, IDS, OFFSETS)
    with pytest.raises(ValueError, match="got a view of shape"):
        ao_lab.embedding_bag(ours.weight.t(), IDS, OFFSETS)
    with pytest.raises(ValueError, match="mode='max' and a padding index"):
        pair(mode="max", padding_idx=3)[0](IDS, OFFSETS)


def test_tables_that_stay_have_reasons():
    """A table with max_norm changes in its forward pass; one whose class reads it otherwise is not known."""

    class Other(nn.EmbeddingBag):
        def forward(self, ids, offsets=None, per_sample_weights=None):
            return self.weight[ids].amin(0)

    model = nn.ModuleDict(
        {
            "norm": nn.EmbeddingBag(40, 64, max_norm=1.0),
            "other": Other(40, 64),
            "bag": nn.EmbeddingBag(40, 64),
        }
    )
    report = ao_lab.quantize_(model, ao_lab.SchemeConfig(scheme="int8_rowwise"), bags)
    reasons = {layer.name: layer.reason for layer in report.layers if not layer.changed}
    assert "max_norm=1.0 changes rows" in reasons["norm.weight"]
    assert "Other does not read its table" in reasons["other.weight"]
    assert [layer.name for layer in report.changed] == ["bag.weight"]


def test_a_folder_of_it_loads_bit_for_bit(tmp_path):
    ours, _ = pair()
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    again = nn.EmbeddingBag(40, 64)
    again.load_state_dict(torch.load(tmp_path / "state.pt"), assign=True)
    assert again(IDS, OFFSETS).equal(ours(IDS, OFFSETS))
