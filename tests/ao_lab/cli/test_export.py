"""`ao-lab export`: a quantized folder as one file."""

import json

import pytest
import torch

import ao_lab
from ao_lab.cli.app import main
from tests.support.models.hf_models import save_llama

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A quantized folder with its tokenizer."""
    path = tmp_path_factory.mktemp("export")
    model = save_llama(path / "model")
    ao_lab.quantize_(model, ao_lab.SchemeConfig(scheme="int4_g32_f16"))
    ao_lab.save_pretrained(model, path / "quantized", layout="ao_lab")
    (path / "quantized" / "tokenizer.json").write_bytes((path / "model" / "tokenizer.json").read_bytes())
    return path / "quantized"


def test_a_file_with_the_folder_s_weights(folder, tmp_path, capsys):
    target = tmp_path / "model.gguf"
    assert main(["export", str(folder), str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "file": str(target),
        "bytes": target.stat().st_size,
        "types": {"BF16": 1, "F32": 3, "Q4_0": 8},
    }
    read, model = ao_lab.load_gguf(target), ao_lab.load_pretrained(folder)
    for name, weight in model.named_parameters():
        other = read.get_parameter(name)
        assert torch.equal(other.dequantize() if hasattr(other, "scheme") else other, weight.dequantize()), (
            name
        )
    assert gguf.GGUFReader(target).fields["tokenizer.ggml.model"].contents() == "gpt2"


def test_an_embedding_by_a_scheme(folder, tmp_path, capsys):
    """As the folder's card says."""
    assert "ao-lab export quantized model.gguf --embedding int8_g32_f16" in (folder / "README.md").read_text()
    target = tmp_path / "model.gguf"
    options = ["export", str(folder), str(target), "--embedding", "int8_g32_f16"]
    assert main([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["types"] == {"Q8_0": 1, "F32": 3, "Q4_0": 8}
    options[2] = str(tmp_path / "model.onnx")
    assert main(options) == 2
    assert "an option of GGUF" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_language_model_in_onnx(folder, tmp_path, capsys):
    """Any number of texts and tokens, logits within float32's rounding of what the loaded model gives."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    import onnxruntime

    target = tmp_path / "model.onnx"
    assert main(["export", str(folder), str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operators"] == {"MatMulNBits": 8}
    session = onnxruntime.InferenceSession(target)
    model = ao_lab.load_pretrained(folder, dtype=torch.float32).eval()
    for shape in ((1, 1), (3, 17)):
        ids = torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(0))
        (logits,) = session.run(None, {"input_ids": ids.numpy()})
        with torch.no_grad():
            wanted = model(ids).logits
        # One block of layers, sums of at most 256 terms.
        assert (torch.from_numpy(logits) - wanted).abs().max() < 2**-14 * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.bin", "does not end in .gguf, .onnx; give --format gguf"),
        ("there.gguf", "there.gguf is there already"),
    ],
)
def test_wrong_input(folder, tmp_path, capsys, name, message):
    (tmp_path / "there.gguf").write_text("mine")
    assert main(["export", str(folder), str(tmp_path / name)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "there.gguf").read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["there.gguf"]
