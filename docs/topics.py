"""The API pages of `ao_lab` by topic: which public names stand together. A test holds that every one is on exactly one page."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """A page: its title, what it is about (Markdown), names (of `ao_lab` where they have no dot), and guides."""

    title: str
    about: str
    names: str
    guides: str


#: By the name of the page.
TOPICS = {
    "quantize": Topic(
        "Quantize a model",
        "`quantize_` changes a model in place; the configuration says to which scheme.",
        """quantize_ quantize_pretrained explain Report Layer linear_and_experts QuantizedTensor SparseQuantizedTensor quantized
        quantized_compressed model_size weight_size ModelSize LayerSize Size register_operators compile_options
        prepare_for_generate_ GenerationSettings tune Tuned""",
        "guides/quantize.md",
    ),
    "configurations": Topic(
        "Configurations",
        "What `quantize_` takes. Names and parameters are those of torchao. All have the methods of `SchemeConfig`.",
        """Int4WeightOnlyConfig Int8WeightOnlyConfig Int8DynamicActivationInt8WeightConfig Int8StaticActivationInt8WeightConfig
        Int8DynamicActivationIntxWeightConfig IntxWeightOnlyConfig LowBitWeightOnlyConfig Float8WeightOnlyConfig
        Float8DynamicActivationFloat8WeightConfig Float8StaticActivationFloat8WeightConfig
        Float8DynamicActivationInt4WeightConfig MXWeightOnlyConfig MXDynamicActivationMXWeightConfig
        NVFP4WeightOnlyConfig NVFP4DynamicActivationNVFP4WeightConfig
        NF4WeightOnlyConfig SchemeConfig FqnToConfig HfConfig Recipe SparseRecipe as_torchao PerTensor PerRow PerToken PerAxis
        PerGroup PerBlock MappingType""",
        "choose.md",
    ),
    "calibration": Topic(
        "Calibrate",
        "Methods that find scales and quantized values from data, and static scales of inputs. ",
        """AWQ GPTQ HQQ AutoRound LowRank BiasCorrection Clip Rotate Smooth StaticKV LayerResult calibrate AbsMax MinMax
        MovingAverage Percentile""",
        "guides/calibrate.md",
    ),
    "choose": Topic(
        "Choose a configuration for each layer",
        "",
        "choose_ Choice Bits Bytes Microseconds",
        "guides/per_layer.md",
    ),
    "measure": Topic(
        "Measure and compare models",
        "What a model loses by quantization, and what it gains, on a text and shapes of your own.",
        "compare Comparison Compared evaluate Evaluation HarnessOptions benchmark Benchmark Timed",
        "guides/tables.md",
    ),
    "probe": Topic(
        "Errors of layers, and policies",
        "What low precision costs each layer.",
        "probe_ Probe ProbeReport dispatch_ Policy apply_policy_ apply_mods_ undo_mods_",
        "guides/probe.md",
    ),
    "qat": Topic(
        "Quantization-aware training and LoRA",
        "",
        """QATConfig advance_qat LoRA save_adapter load_adapter lora_state_dict llama32_qat llama32_configs FakeQuantizeConfig
        IntxFakeQuantizeConfig Float8FakeQuantizeConfig IntXQuantizationAwareTrainingConfig
        FromIntXQuantizationAwareTrainingConfig""",
        "guides/qat.md guides/lora.md",
    ),
    "training": Topic(
        "Train in FP8 and MX",
        "",
        """convert_for_training_ convert_from_training_ Converted convert_to_float8_training Float8LinearConfig
        Float8LinearRecipeName Float8GemmConfig CastConfig ScalingType ScalingGranularity
        precompute_float8_dynamic_scale_for_fsdp LowPrecisionColwiseParallel LowPrecisionRowwiseParallel""",
        "guides/training.md",
    ),
    "optimizers": Topic(
        "Optimizers",
        "`ao_lab.optim`.",
        """ao_lab.optim.AdamW8bit ao_lab.optim.AdamW4bit ao_lab.optim.AdamWFp8 ao_lab.optim.Adam8bit ao_lab.optim.Adam4bit
        ao_lab.optim.AdamFp8 ao_lab.optim.Lion8bit ao_lab.optim.CPUOffloadOptimizer ao_lab.optim.LowBitOptimizer""",
        "guides/optimizers.md",
    ),
    "sparsity": Topic(
        "Sparsity",
        "",
        """sparsify_ SparsityConfig SparsityReport SparseLayer SparseTrainingConfig step_sparsity_ SparsityStep finish_sparsity_
        SparseSquaredReLU sparse_squared_relu prune compress decompress""",
        "guides/sparsity.md",
    ),
    "inference": Topic(
        "KV cache, attention, drafts",
        "",
        """use_kv_cache_ KVCache KVCacheSettings KVRecipe use_attention_ AttentionSettings AttentionRecipe replace_sdpa_
        ReplacedAttention GreedyDecoding SelfSpeculation Speculated embedding_bag all_to_all_rows""",
        "guides/kv_cache.md guides/attention.md",
    ),
    "checkpoints": Topic(
        "Save, load, export",
        "",
        """save_pretrained load_pretrained Saved write_card save_gguf load_gguf GgufFile export_onnx OnnxFile export_executorch
        save_mlx MlxFolder""",
        "guides/serve.md guides/checkpoints.md",
    ),
    "arrays": Topic(
        "Arrays, formats and schemes",
        "Functions of NumPy arrays, JAX arrays and torch tensors, the same in all three. ",
        """quantize dequantize quantize_both fake_quantize fake_quantize_vjp choose_scales encode decode pack unpack tile_scales
        untile_scales matmul matmul_error_bound rms_norm rms_norm_quantize swiglu swiglu_quantize Format Scheme Scale Zero
        FORMATS SCHEMES Quantized Scales register __version__ to_native from_native native_dtype NativeParts""",
        "guides/formats.md",
    ),
    "jax": Topic(
        "JAX",
        "`ao_lab.jax`.",
        """ao_lab.jax.quantize_params ao_lab.jax.quantize_ ao_lab.jax.fake_quantize_params ao_lab.jax.dequantize_params
        ao_lab.jax.QuantizedParam ao_lab.jax.Axes ao_lab.jax.quantize ao_lab.jax.dequantize ao_lab.jax.fake_quantize
        ao_lab.jax.choose_scales ao_lab.jax.matmul ao_lab.jax.dot_general ao_lab.jax.from_torch ao_lab.jax.to_torch
        ao_lab.jax.training.DotGeneral ao_lab.jax.training.einsum""",
        "guides/jax.md",
    ),
    "plot": Topic(
        "Figures",
        "`ao_lab.plot`: formats, errors and tensors drawn by matplotlib (extra `[plot]`). Each function returns the Figure.",
        """ao_lab.plot.values ao_lab.plot.formats ao_lab.plot.error ao_lab.plot.tensor ao_lab.plot.schemes
        ao_lab.plot.scheme_errors ao_lab.plot.SchemeError ao_lab.plot.tradeoff ao_lab.plot.Point ao_lab.plot.save""",
        "guides/figures.md",
    ),
    "testing": Topic(
        "Testing",
        "`ao_lab.testing`: inputs that break kernels, comparisons.",
        """ao_lab.testing.probe_kernel ao_lab.testing.KernelReport ao_lab.testing.blocks ao_lab.testing.float_arrays
        ao_lab.testing.ties ao_lab.testing.shapes ao_lab.testing.fill ao_lab.testing.assert_same_bits
        ao_lab.testing.assert_same_quantized ao_lab.testing.KINDS ao_lab.testing.FINITE_KINDS ao_lab.testing.MAXIMA""",
        "guides/kernels.md",
    ),
}


def names(topic: Topic) -> list[str]:
    """Full names of a page."""
    return [name if "." in name else f"ao_lab.{name}" for name in topic.names.split()]


#: What names mean that are neither functions nor classes (reStructuredText).
DATA = {
    "FORMATS": "Formats by name: read-only records of :py:class:`ao_lab.Format`. Add one with :py:func:`ao_lab.register`.",
    "SCHEMES": "Schemes by name: read-only records of :py:class:`ao_lab.Scheme`. Add one with :py:func:`ao_lab.register`.",
    "RECIPES": "Recipes of training by name: which scheme each operand of the three matmuls of a linear layer has.",
    "METADATA_LAYOUTS": "Orders in which 2:4 metadata are stored, by name.",
    "KINDS": "Kinds of elements that :py:func:`ao_lab.testing.fill` and :py:func:`ao_lab.testing.float_arrays` draw:",
    "FINITE_KINDS": "Those kinds whose values are all finite:",
    "MAXIMA": "Largest magnitudes of the blocks that :py:func:`ao_lab.testing.blocks` draws:",
    "__version__": "The version of the installed package, a string.",
}
