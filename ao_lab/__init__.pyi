"""The public names of ao_lab and the modules that define them, for type checkers and for `ao_lab.__getattr__`."""

from ao_lab import jax as jax
from ao_lab import optim as optim
from ao_lab import plot as plot
from ao_lab import testing as testing
from ao_lab.attention import AttentionSettings as AttentionSettings
from ao_lab.attention import ReplacedAttention as ReplacedAttention
from ao_lab.attention import replace_sdpa_ as replace_sdpa_
from ao_lab.attention import use_attention_ as use_attention_
from ao_lab.calibration.methods import AWQ as AWQ
from ao_lab.calibration.methods import GPTQ as GPTQ
from ao_lab.calibration.methods import HQQ as HQQ
from ao_lab.calibration.methods import AutoRound as AutoRound
from ao_lab.calibration.methods import BiasCorrection as BiasCorrection
from ao_lab.calibration.methods import Clip as Clip
from ao_lab.calibration.methods import LowRank as LowRank
from ao_lab.calibration.methods import Rotate as Rotate
from ao_lab.calibration.methods import Smooth as Smooth
from ao_lab.calibration.methods import StaticKV as StaticKV
from ao_lab.calibration.result import LayerResult as LayerResult
from ao_lab.calibration.static import (
    Float8StaticActivationFloat8WeightConfig as Float8StaticActivationFloat8WeightConfig,
)
from ao_lab.calibration.static import (
    Int8StaticActivationInt8WeightConfig as Int8StaticActivationInt8WeightConfig,
)
from ao_lab.calibration.statistics import AbsMax as AbsMax
from ao_lab.calibration.statistics import MinMax as MinMax
from ao_lab.calibration.statistics import MovingAverage as MovingAverage
from ao_lab.calibration.statistics import Percentile as Percentile
from ao_lab.checkpoint.adapters import load_adapter as load_adapter
from ao_lab.checkpoint.adapters import save_adapter as save_adapter
from ao_lab.checkpoint.api import Saved as Saved
from ao_lab.checkpoint.api import load_pretrained as load_pretrained
from ao_lab.checkpoint.api import save_pretrained as save_pretrained
from ao_lab.checkpoint.model_card import write_card as write_card
from ao_lab.checkpoint.size import LayerSize as LayerSize
from ao_lab.checkpoint.size import ModelSize as ModelSize
from ao_lab.checkpoint.size import Size as Size
from ao_lab.checkpoint.size import model_size as model_size
from ao_lab.checkpoint.size import weight_size as weight_size
from ao_lab.checkpoint.streaming import quantize_pretrained as quantize_pretrained
from ao_lab.checkpoint.transformers.config import HfConfig as HfConfig
from ao_lab.choose.api import choose_ as choose_
from ao_lab.choose.budgets import Bits as Bits
from ao_lab.choose.budgets import Bytes as Bytes
from ao_lab.choose.budgets import Microseconds as Microseconds
from ao_lab.choose.result import Choice as Choice
from ao_lab.clients.executorch import export_executorch as export_executorch
from ao_lab.clients.gguf.read import load_gguf as load_gguf
from ao_lab.clients.gguf.write import GgufFile as GgufFile
from ao_lab.clients.gguf.write import save_gguf as save_gguf
from ao_lab.clients.mlx import MlxFolder as MlxFolder
from ao_lab.clients.mlx import save_mlx as save_mlx
from ao_lab.clients.onnx import OnnxFile as OnnxFile
from ao_lab.clients.onnx import export_onnx as export_onnx
from ao_lab.compile.ahead_of_time import register_operators as register_operators
from ao_lab.compile.fused_linears import compile_options as compile_options
from ao_lab.compile.generation import GenerationSettings as GenerationSettings
from ao_lab.compile.generation import prepare_for_generate_ as prepare_for_generate_
from ao_lab.config.base import FqnToConfig as FqnToConfig
from ao_lab.config.base import SchemeConfig as SchemeConfig
from ao_lab.config.classes import (
    Float8DynamicActivationFloat8WeightConfig as Float8DynamicActivationFloat8WeightConfig,
)
from ao_lab.config.classes import (
    Float8DynamicActivationInt4WeightConfig as Float8DynamicActivationInt4WeightConfig,
)
from ao_lab.config.classes import Float8WeightOnlyConfig as Float8WeightOnlyConfig
from ao_lab.config.classes import Int4WeightOnlyConfig as Int4WeightOnlyConfig
from ao_lab.config.classes import (
    Int8DynamicActivationInt8WeightConfig as Int8DynamicActivationInt8WeightConfig,
)
from ao_lab.config.classes import (
    Int8DynamicActivationIntxWeightConfig as Int8DynamicActivationIntxWeightConfig,
)
from ao_lab.config.classes import Int8WeightOnlyConfig as Int8WeightOnlyConfig
from ao_lab.config.classes import IntxWeightOnlyConfig as IntxWeightOnlyConfig
from ao_lab.config.classes import LowBitWeightOnlyConfig as LowBitWeightOnlyConfig
from ao_lab.config.classes import MXDynamicActivationMXWeightConfig as MXDynamicActivationMXWeightConfig
from ao_lab.config.classes import MXWeightOnlyConfig as MXWeightOnlyConfig
from ao_lab.config.classes import NF4WeightOnlyConfig as NF4WeightOnlyConfig
from ao_lab.config.classes import (
    NVFP4DynamicActivationNVFP4WeightConfig as NVFP4DynamicActivationNVFP4WeightConfig,
)
from ao_lab.config.classes import NVFP4WeightOnlyConfig as NVFP4WeightOnlyConfig
from ao_lab.config.granularity import MappingType as MappingType
from ao_lab.config.granularity import PerAxis as PerAxis
from ao_lab.config.granularity import PerBlock as PerBlock
from ao_lab.config.granularity import PerGroup as PerGroup
from ao_lab.config.granularity import PerRow as PerRow
from ao_lab.config.granularity import PerTensor as PerTensor
from ao_lab.config.granularity import PerToken as PerToken
from ao_lab.config.recipe import Recipe as Recipe
from ao_lab.config.recipe import SparseRecipe as SparseRecipe
from ao_lab.config.torchao import as_torchao as as_torchao
from ao_lab.greedy_decoding import GreedyDecoding as GreedyDecoding
from ao_lab.interop import NativeParts as NativeParts
from ao_lab.interop import from_native as from_native
from ao_lab.interop import native_dtype as native_dtype
from ao_lab.interop import to_native as to_native
from ao_lab.kv_cache.cache import KVCache as KVCache
from ao_lab.kv_cache.cache import KVCacheSettings as KVCacheSettings
from ao_lab.kv_cache.cache import use_kv_cache_ as use_kv_cache_
from ao_lab.kv_cache.recipe import KVRecipe as KVRecipe
from ao_lab.measure.benchmark import benchmark as benchmark
from ao_lab.measure.compare import compare as compare
from ao_lab.measure.comparison import Compared as Compared
from ao_lab.measure.comparison import Comparison as Comparison
from ao_lab.measure.evaluate import Evaluation as Evaluation
from ao_lab.measure.evaluate import HarnessOptions as HarnessOptions
from ao_lab.measure.evaluate import evaluate as evaluate
from ao_lab.measure.times import Benchmark as Benchmark
from ao_lab.measure.times import Timed as Timed
from ao_lab.mods.api import apply_mods_ as apply_mods_
from ao_lab.mods.api import undo_mods_ as undo_mods_
from ao_lab.policy.api import Policy as Policy
from ao_lab.policy.api import apply_policy_ as apply_policy_
from ao_lab.policy.api import dispatch_ as dispatch_
from ao_lab.probe.api import probe_ as probe_
from ao_lab.probe.online import Probe as Probe
from ao_lab.probe.report import ProbeReport as ProbeReport
from ao_lab.qat.config import FakeQuantizeConfig as FakeQuantizeConfig
from ao_lab.qat.config import Float8FakeQuantizeConfig as Float8FakeQuantizeConfig
from ao_lab.qat.config import (
    FromIntXQuantizationAwareTrainingConfig as FromIntXQuantizationAwareTrainingConfig,
)
from ao_lab.qat.config import IntxFakeQuantizeConfig as IntxFakeQuantizeConfig
from ao_lab.qat.config import IntXQuantizationAwareTrainingConfig as IntXQuantizationAwareTrainingConfig
from ao_lab.qat.config import LoRA as LoRA
from ao_lab.qat.config import QATConfig as QATConfig
from ao_lab.qat.config import advance_qat as advance_qat
from ao_lab.qat.config import llama32_configs as llama32_configs
from ao_lab.qat.config import llama32_qat as llama32_qat
from ao_lab.qat.lora import lora_state_dict as lora_state_dict
from ao_lab.quantization.api import calibrate as calibrate
from ao_lab.quantization.api import quantize_ as quantize_
from ao_lab.quantization.report import Layer as Layer
from ao_lab.quantization.report import Report as Report
from ao_lab.quantization.report import explain as explain
from ao_lab.self_speculation import SelfSpeculation as SelfSpeculation
from ao_lab.self_speculation import Speculated as Speculated
from ao_lab.sparsity.api import sparsify_ as sparsify_
from ao_lab.sparsity.config import SparsityConfig as SparsityConfig
from ao_lab.sparsity.plan import SparseLayer as SparseLayer
from ao_lab.sparsity.plan import SparsityReport as SparsityReport
from ao_lab.sparsity.training.api import SparsityStep as SparsityStep
from ao_lab.sparsity.training.api import finish_sparsity_ as finish_sparsity_
from ao_lab.sparsity.training.api import step_sparsity_ as step_sparsity_
from ao_lab.sparsity.training.config import SparseTrainingConfig as SparseTrainingConfig
from ao_lab.sparsity.training.layers import SparseSquaredReLU as SparseSquaredReLU
from ao_lab.sparsity.training.layers import sparse_squared_relu as sparse_squared_relu
from ao_lab.tensor.all_to_all import all_to_all_rows as all_to_all_rows
from ao_lab.tensor.lookup_ops import embedding_bag as embedding_bag
from ao_lab.tensor.quantized_tensor import QuantizedTensor as QuantizedTensor
from ao_lab.tensor.quantized_tensor import SparseQuantizedTensor as SparseQuantizedTensor
from ao_lab.tensor.quantized_tensor import quantized as quantized
from ao_lab.tensor.sparse import quantized_compressed as quantized_compressed
from ao_lab.training.api import Converted as Converted
from ao_lab.training.api import convert_for_training_ as convert_for_training_
from ao_lab.training.api import convert_from_training_ as convert_from_training_
from ao_lab.training.float8 import CastConfig as CastConfig
from ao_lab.training.float8 import Float8GemmConfig as Float8GemmConfig
from ao_lab.training.float8 import Float8LinearConfig as Float8LinearConfig
from ao_lab.training.float8 import Float8LinearRecipeName as Float8LinearRecipeName
from ao_lab.training.float8 import ScalingGranularity as ScalingGranularity
from ao_lab.training.float8 import ScalingType as ScalingType
from ao_lab.training.float8 import convert_to_float8_training as convert_to_float8_training
from ao_lab.training.fsdp import (
    precompute_float8_dynamic_scale_for_fsdp as precompute_float8_dynamic_scale_for_fsdp,
)
from ao_lab.training.tensor_parallel import (
    LowPrecisionColwiseParallel as LowPrecisionColwiseParallel,
)
from ao_lab.training.tensor_parallel import (
    LowPrecisionRowwiseParallel as LowPrecisionRowwiseParallel,
)
from ao_lab.transforms.layers import linear_and_experts as linear_and_experts
from ao_lab.tuning.api import Tuned as Tuned
from ao_lab.tuning.api import tune as tune
from reference import FORMATS as FORMATS
from reference import SCHEMES as SCHEMES
from reference import Format as Format
from reference import Quantized as Quantized
from reference import Scale as Scale
from reference import Scales as Scales
from reference import Scheme as Scheme
from reference import Zero as Zero
from reference import choose_scales as choose_scales
from reference import compress as compress
from reference import decode as decode
from reference import decompress as decompress
from reference import dequantize as dequantize
from reference import encode as encode
from reference import fake_quantize as fake_quantize
from reference import fake_quantize_vjp as fake_quantize_vjp
from reference import matmul as matmul
from reference import matmul_error_bound as matmul_error_bound
from reference import pack as pack
from reference import prune as prune
from reference import quantize as quantize
from reference import quantize_both as quantize_both
from reference import register as register
from reference import rms_norm as rms_norm
from reference import rms_norm_quantize as rms_norm_quantize
from reference import swiglu as swiglu
from reference import swiglu_quantize as swiglu_quantize
from reference import tile_scales as tile_scales
from reference import unpack as unpack
from reference import untile_scales as untile_scales
from reference.attention.quantized import AttentionRecipe as AttentionRecipe

__version__: str
HOMES: dict[str, str]
__all__: list[str]
