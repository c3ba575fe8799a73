"""Folders that compressed-tensors' own code compresses and transformers saves: what llm-compressor leaves, made in a second."""

import json
import math

import torch

#: Weights' QuantizationArgs by a short name; what is not said is the library's default.
INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
MX = {
    "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
}  # fmt: skip
NVFP4 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}  # fmt: skip


def tiny_llama(dtype=torch.bfloat16, *, tied=False, seed=0, hidden=128):
    """A random Llama of one layer, its weights of many magnitudes."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=hidden, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= torch.randn(weight.shape[0], 1).exp()
    return model.to(dtype)


def scales_of(weight, args):
    """(scale, zero point, global scale) by the library's own rules, each row, group or block by its extremes."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    rows, columns = weight.shape
    if args.strategy == "block":
        r, c = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % c, 0, -rows % r))
        view = padded.unflatten(1, (-1, c)).unflatten(0, (-1, r)).transpose(1, 2).flatten(2)
    else:
        sizes = {"tensor": None, "channel": columns}
        size = sizes.get(args.strategy, args.group_size)
        view = weight.reshape(1, -1) if size is None else weight.unflatten(1, (-1, size))
    low, high = view.amin(-1), view.amax(-1)
    given = generate_gparam(low.min(), high.max()).reshape(1) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=given)
    return scale.reshape(1) if args.strategy == "tensor" else scale, zero, given


def apply(model, groups, ignore=("lm_head",), **more):
    """Give a model quantization_config's schemes, and its modules the scales of their weights."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = {"config_groups": groups, "ignore": list(ignore), "quantization_status": "frozen", **more}
    apply_quantization_config(model, QuantizationConfig(**config), show_progress=False)
    for module in quantized_modules(model).values():
        args = module.quantization_scheme.weights
        scale, zero, outer = scales_of(module.weight.data, args)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        if getattr(module, "weight_zero_point", None) is not None and not args.symmetric:
            shape = module.weight_zero_point.shape
            module.weight_zero_point.data = zero.reshape(shape).to(module.weight_zero_point.dtype)
        if outer is not None:
            module.weight_global_scale.data = outer
        for name in ("input_scale", "input_global_scale"):
            if getattr(module, name, None) is not None:
                getattr(module, name).data.fill_(0.031 if name == "input_scale" else 311.0)
    return model


def quantized_modules(model):
    """Those with a scheme for their weights, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
        and module.quantization_scheme.weights is not None
    }


def compress(model, path, *, scales=None):
    """Compress, save, and say what the library's own decompressors make of each weight, by the weight's name."""
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.utils import get_direct_state_dict

    if scales is not None:
        for module in quantized_modules(model).values():
            module.weight_scale.data = module.weight_scale.data.to(scales)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    made = {}
    for name, module in quantized_modules(model).items():
        scheme = module.quantization_scheme
        kind = BaseCompressor.get_value_from_registry(scheme.format)
        made[f"{name}.weight"] = kind.decompress(get_direct_state_dict(module), scheme)["weight"].detach()
    return made


def edit_config(path, change):
    """Change the quantization_config of a folder by a function of it."""
    file = path / "config.json"
    fields = json.loads(file.read_text())
    made = change(fields.get("quantization_config"))
    if made is not None:
        fields["quantization_config"] = made
    file.write_text(json.dumps(fields))


def edit_tensors(path, change):
    """Change the tensors of a folder's one file by a function of them."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    made = change(tensors)
    save_file(tensors if made is None else made, file, metadata={"format": "pt"})


def same_bits(a, b):
    """Whether two tensors are of one dtype and shape, and equal bit for bit."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def group(weights, inputs=None, targets=("Linear",)):
    """A config group."""
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


def words(count, bits):
    """int32 words of `count` codes."""
    return math.ceil(count * bits / 32)
