"""What the report says in text."""

from torch import nn

from ao_lab import SparseLayer, SparsityReport, explain
from ao_lab.sparsity.report import remember


def test_lines():
    report = SparsityReport((
        SparseLayer("a.weight", "Linear", (8, 8), "Linear", "2:4", "sparsegpt", 0.5, 40, 1.5, 0.02, 1e-6),
        SparseLayer("head.weight", "Linear", (8, 8), "refused by filter_fn"),
    ))  # fmt: skip
    assert [layer.name for layer in report.changed] == ["a.weight"]
    assert [layer.name for layer in report.left] == ["head.weight"]
    assert str(report).splitlines() == [
        "1 of 2 layers pruned",
        "  a.weight     2:4 by sparsegpt, 50.0 % zeros, loss 1.5, damping 0.02, floor 1e-06: Linear",
        "  head.weight  left: refused by filter_fn",
    ]


def test_explain_says_how_a_layer_was_pruned():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    remember(model, "0.weight", "2:4 by wanda")
    assert [layer.sparsity for layer in explain(model).layers] == ["2:4 by wanda", ""]
    assert "0.weight  left, 2:4 by wanda: never given to quantize_" in str(explain(model))
