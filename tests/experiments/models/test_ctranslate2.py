"""Whisper in CTranslate2's format: what is written there is read as transformers has it, and broken files are refused."""

import struct

import pytest
import torch

from experiments.models.ctranslate2 import save_whisper, state, variables

transformers = pytest.importorskip("transformers")
CONFIG = {
    "vocab_size": 60000, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 20,
    "max_target_positions": 12,
}  # fmt: skip


def small():
    torch.manual_seed(0)
    made = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**CONFIG)).half()
    for parameter in made.parameters():
        parameter.data.normal_()
    return made


def stored(model):
    """The variables of a model as CTranslate2 calls them."""
    w = {name: value.half() for name, value in model.state_dict().items()}
    made = {"decoder/embeddings/weight": w["model.decoder.embed_tokens.weight"]}
    zero = torch.zeros(16).half()
    for side, count in (("encoder", 2), ("decoder", 1)):
        made[f"{side}/num_heads"] = torch.tensor(2, dtype=torch.int16)
        made[f"{side}/position_encodings/encodings"] = w[f"model.{side}.embed_positions.weight"]
        put_norm(made, f"{side}/layer_norm", w, f"model.{side}.layer_norm")
        for number in range(count):
            to, name = f"{side}/layer_{number}/", f"model.{side}.layers.{number}."
            put_norm(made, f"{to}self_attention/layer_norm", w, f"{name}self_attn_layer_norm")
            put(
                made,
                f"{to}self_attention/linear_0",
                w,
                [f"{name}self_attn.{one}_proj" for one in "qkv"],
                zero,
            )
            put(made, f"{to}self_attention/linear_1", w, [f"{name}self_attn.out_proj"], zero)
            if side == "decoder":
                put_norm(made, f"{to}attention/layer_norm", w, f"{name}encoder_attn_layer_norm")
                put(made, f"{to}attention/linear_0", w, [f"{name}encoder_attn.q_proj"], zero)
                put(
                    made,
                    f"{to}attention/linear_1",
                    w,
                    [f"{name}encoder_attn.{one}_proj" for one in "kv"],
                    zero,
                )
                put(made, f"{to}attention/linear_2", w, [f"{name}encoder_attn.out_proj"], zero)
            put_norm(made, f"{to}ffn/layer_norm", w, f"{name}final_layer_norm")
            put(made, f"{to}ffn/linear_0", w, [f"{name}fc1"], zero)
            put(made, f"{to}ffn/linear_1", w, [f"{name}fc2"], zero)
    for name in ("conv1", "conv2"):
        put(made, f"encoder/{name}", w, [f"model.encoder.{name}"], zero)
    return made


def put_norm(made, to, w, name):
    made[f"{to}/gamma"], made[f"{to}/beta"] = w[f"{name}.weight"], w[f"{name}.bias"]


def put(made, to, w, names, zero):
    made[f"{to}/weight"] = torch.cat([w[f"{name}.weight"] for name in names])
    made[f"{to}/bias"] = torch.cat([w.get(f"{name}.bias", zero) for name in names])


def written(found, version=6, name="WhisperSpec"):
    def string(text):
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    data = struct.pack("<I", version) + string(name) + struct.pack("<II", 3, len(found))
    for key, value in found.items():
        raw = value.numpy().tobytes()
        kind = {torch.float16: 4, torch.int16: 2}[value.dtype]
        shape = struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)
        data += string(key) + shape + struct.pack("<BI", kind, len(raw)) + raw
    return (
        data
        + struct.pack("<I", 1)
        + string("decoder/projection/weight")
        + string("decoder/embeddings/weight")
    )


def test_a_model_comes_back_as_it_was(tmp_path):
    model = small()
    (tmp_path / "model.bin").write_bytes(written(stored(model)))
    save_whisper(tmp_path / "model.bin", tmp_path / "model")
    made = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "model", dtype="auto")
    wanted = model.state_dict()
    assert {name: value.dtype for name, value in made.state_dict().items()} == dict.fromkeys(
        wanted, torch.float16
    )
    assert all(torch.equal(value, wanted[name]) for name, value in made.state_dict().items())
    assert {name: getattr(made.config, name) for name in CONFIG} == CONFIG


def test_other_files_are_refused():
    found = stored(small())
    data = written(found)
    with pytest.raises(ValueError, match="got version 5"):
        variables(written({}, version=5))
    with pytest.raises(ValueError, match="and 'TransformerSpec'"):
        variables(written({}, name="TransformerSpec"))
    with pytest.raises(ValueError, match="ends within a value"):
        variables(data[: len(data) // 2])
    biased = dict(found)
    biased["encoder/layer_0/self_attention/linear_0/bias"] = torch.ones(48).half()
    with pytest.raises(ValueError, match="keys have a bias"):
        state(biased)
