"""`ao-lab quantize --sparsity 2:4`: pruned, quantized, compressed, and read again."""

import json

import pytest
import torch

from ao_lab import (
    Int8WeightOnlyConfig,
    SparseQuantizedTensor,
    SparsityConfig,
    load_pretrained,
    quantize_,
    sparsify_,
)
from ao_lab.cli.app import main
from tests.ao_lab.cli.test_quantize import complaint, folder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
__all__ = ["folder"]


def is_block(module, path):
    return isinstance(module, torch.nn.Linear) and path != "lm_head"


def test_a_folder_with_compressed_weights(capsys, folder, tmp_path):
    target = tmp_path / "out"
    command = [
        "quantize",
        str(folder),
        str(target),
        "--config",
        "Int8WeightOnlyConfig",
        "--sparsity",
        "2:4",
        "--json",
    ]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"] == "ao_lab"
    assert "pruned to 2:4 by magnitude" in told["changes"][0]
    layers = {row["layer"]: row for row in told["layers"]}
    one = layers["model.layers.0.mlp.down_proj.weight"]
    assert (one["sparsity"], one["storage"]) == ("2:4 by magnitude", "compressed")
    assert one["bytes"] == 128 * 256 // 2 + 128 * 256 // 8 + 128 * 4
    assert layers["lm_head.weight"]["storage"] == "dense"
    found = load_pretrained(target)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    sparsify_(model, SparsityConfig(), is_block)
    quantize_(model, Int8WeightOnlyConfig(sparsity="2:4"), is_block)
    for (name, a), (_, b) in zip(found.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert isinstance(found.model.layers[0].mlp.down_proj.weight, SparseQuantizedTensor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "int8_rowwise", "--sparsity", "1:4"], "sparsity"),
        (["--config", "nf4", "--sparsity", "2:4"], "flattened"),
        (
            ["--config", "int8_rowwise", "--sparsity", "2:4", "--layout", "compressed-tensors"],
            "no format of 2:4 weights",
        ),
        (["--config", "int8_rowwise", "--option", "sparsity=2:4"], "--sparsity 2:4 prunes them too"),
    ],
)
def test_wrong_input(capsys, folder, tmp_path, arguments, message):
    code, err = complaint(capsys, folder, tmp_path / "out", *arguments)
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()
