"""What `quantize_` did to each layer and why, and `explain`: what each layer of a model is now.

`print(model)` names the schemes of quantized weights: `Linear(in_features=64, out_features=32, bias=True, weight=nf4)`.

Modules stay the classes that they are, and keep nothing for it: what torch prints of nn.Linear, tables and of modules
without a text of their own (batched experts) is looked up on the class, and says more where a parameter is quantized.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ao_lab.calibration.result import CALIBRATION, LayerResult, few_judges, together
from ao_lab.config.base import Config, FqnToConfig
from ao_lab.config.compressed_tensors import faster_kernel
from ao_lab.config.recipe import SPARSE_KERNELS, Recipe
from ao_lab.gemm.choices import Choice, choices_for, training_operands
from ao_lab.gemm.dense import groups_reason, most_fused_rows
from ao_lab.gemm.select import SPARSE_INT4, families_by_rows, inference_keys, select_kernel
from ao_lab.kv_cache import ATTENTION, KV_CACHE
from ao_lab.tensor.metadata import SPARSE
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.layers import (
    TABLES,
    ConvertedModule,
    Slot,
    check_model,
    contraction_axis,
    first_matrix,
    full_name,
    other_reason,
    quantizable_parameters,
    unsupported_reason,
)
from ao_lab.transforms.low_rank import RESIDUAL
from ao_lab.transforms.report import (
    ATTRIBUTE,
    SPARSITY,
    LayerLine,
    ModelReport,
    remember_changes,
    remember_configuration,
)
from ao_lab.transforms.training_records import saved_training
from fast.gemm.choose import Range
from fast.matmul.preshuffled.grouped import average_rows_as_stored
from fast.matmul.preshuffled.linear import ALL_ROWS
from reference import Scheme, decode, encode

if TYPE_CHECKING:
    from ao_lab.calibration.run import Request


def schemes_of(module: nn.Module) -> str:
    """The quantized parameters of a module itself, and their recipes; "" where it has none."""
    own: dict[str, Any] = dict(module._parameters)
    return ", ".join(f"{name}={one.recipe}" for name, one in own.items() if isinstance(one, QuantizedTensor))


def _with_schemes(extra_repr: Callable[[nn.Module], str]) -> Callable[[nn.Module], str]:
    @wraps(extra_repr)
    def shown(self: nn.Module) -> str:
        return ", ".join(filter(None, (extra_repr(self), schemes_of(self))))

    return shown


_KINDS: tuple[Any, ...] = (nn.Module, nn.Linear, nn.Embedding, nn.EmbeddingBag)
for _kind in _KINDS:
    _kind.extra_repr = _with_schemes(_kind.extra_repr)


#: The reason of layers that nothing was asked of, and of these in a model that trains in low precision.
NOT_CALLED = "quantize_ was not called for it"
NOT_TRAINED = "convert_for_training_ did not convert it; it trains in its own dtype"
#: The reason of adapters, which are parameters beside a layer and no layers.
ADAPTER = "it trains"
#: Those of parameters beside the weight of a layer.
BESIDE = (ADAPTER, RESIDUAL)
#: That of a layer that another has replaced since it was prepared.
REPLACED = "not in QAT (put here after step='prepare')"
#: Of layers whose configuration names the kernel "dequantize", as `Config.for_layout` does.
SLOW = (
    "  dequantize: each matmul dequantizes weights and inputs first, bitwise as transformers does, and takes as long as an "
    "unquantized layer or longer (on a CPU up to three times); a configuration with {} is faster here"
)
#: Of layers that are prepared for QAT on a CPU.
SLOW_TRAINING = (
    "  on a CPU a step takes up to several times as long as without QAT (2 to 7 times was measured where no kernel multiplies "
    "8-bit integers); train on a GPU"
)
#: Of layers that quantize inputs and whose configuration names another kernel.
NAMED = (
    '  kernel="{}": a saved folder holds the same quantized values and scales, but transformers, which dequantizes, rounds '
    "sums otherwise: outputs of a layer differ in the last bits there, those of a model more, since inputs of later layers are "
    "rounded to other values"
)
#: The function of a layer in 2:4 storage on a GPU that no kernel multiplies as it is stored.
SLOWER = "dequantize, slower than bfloat16"


@dataclass(frozen=True)
class Layer(LayerLine):
    """One line of a report: a parameter that can be quantized."""

    #: Schemes as text; "" where it is dense.
    scheme: str
    #: The function that computes with it; "" where that is torch's own.
    kernel: str
    bytes: int
    #: Why it is as it is.
    reason: str
    #: What `ao_lab.tune` chose for its products on its device, by range of rows and direction.
    tuned: tuple[Choice, ...] = ()
    #: Pattern and score by which it was pruned before ("2:4 by wanda"); "" where it was not.
    sparsity: str = ""
    #: "compressed" where kept elements alone are stored.
    storage: str = "dense"
    #: "for QAT" or "with adapters" where step "prepare" has been there; "" where the layer is in no such state.
    prepared: str = ""
    #: The recipe by which it trains in low precision (`ao_lab.convert_for_training_`); "" where it does not.
    recipe: str = ""
    #: On a GPU, what multiplies by it, by ranges of rows of inputs (`fast.gemm.families`).
    families: tuple[Range, ...] = ()
    #: Why families that are quicker did not load in this process, by name; `families` says what multiplies for them.
    failures: Mapping[str, str] = field(default_factory=dict)
    #: The kernel that is faster, where the configuration names "dequantize" and inputs are quantized as well; else "".
    faster: str = ""
    #: The kernel that the configuration names where inputs are quantized, if it is not "dequantize"; else "".
    named: str = ""
    #: What calibration won, where methods quantized it.
    calibrated: LayerResult | None = None

    @property
    def changed(self) -> bool:
        """Whether it is quantized."""
        return bool(self.scheme)

    @property
    def folded_name(self) -> str:
        """See `LayerLine.folded_name`; adapters and residuals of all layers are one line for each of their names."""
        return f"*.{self.name.rpartition('.')[2]}" if self.reason in BESIDE else super().folded_name

    def common(self) -> Layer:
        """Without the numbers of what calibration won, in which blocks differ."""
        if self._won is None:
            return self
        return replace(self, reason=f"{self._before(self._won)}; {self._won.method}", calibrated=None)

    def together(self, alike: Sequence[Layer]) -> Layer:
        """With the range of what calibration won, where all won something."""
        results = [one._won for one in alike if one._won is not None]
        if self._won is None or len({str(one) for one in results}) < 2:
            return self
        return replace(self, reason=f"{self._before(self._won)}; {together(results)}")

    @property
    def _won(self) -> LayerResult | None:
        """What calibration won, where it is that alone and the reason ends in it."""
        won = self.calibrated
        return won if won is not None and won.is_plain and self.reason.endswith(f"; {won}") else None

    def _before(self, won: LayerResult) -> str:
        """The reason without it."""
        return self.reason.removesuffix(f"; {won}")

    def told(self, width: int) -> list[str]:
        """Its scheme, what computes with it, and the reason; below it what multiplies by rows, and what was tuned."""
        what = "prepared" if self.prepared else "adapter" if self.reason == ADAPTER else "left"
        more = "; the weight is dequantized for more" if self.kernel.startswith("fused, up to") else ""
        what = f"{self.scheme} ({self.kernel}{more})" if self.changed else what
        what += f", {self.sparsity}" if self.sparsity else ""
        what += f", {self.storage}, {self.bytes} bytes" if self.storage != "dense" else ""
        trains = self.recipe and not self.prepared and what == "left"
        alone = trains or self.reason == RESIDUAL
        lines = [f"  {self.name:<{width}}  {self.reason if alone else f'{what}: {self.reason}'}"]
        lines += [f"    {', '.join(map(str, self.families))}"] if self.families else []
        lines += [f"    {name} did not load: {first_line(why)}" for name, why in self.failures.items()]
        return lines + [f"    tuned: {choice}" for choice in self.tuned]


def first_line(text: str) -> str:
    """Of a reason of several lines, such as a compiler's log."""
    return text.strip().partition("\n")[0]


@dataclass(frozen=True)
class Report(ModelReport[Layer]):
    """Every layer of a model that `quantize_` considered, in the order of its modules, before adapters and residuals."""

    #: What `use_kv_cache_` set, as text; "" where generate() has transformers' own cache.
    kv_cache: str = ""
    #: What `use_attention_` set, as text; "" where it set nothing.
    attention: str = ""
    #: Whether layers that step "prepare" has prepared are on a CPU.
    prepared_on_cpu: bool = False
    #: With what the checkpoint trained from which a dense model was read; "" for others.
    saved_training: str = ""

    @property
    def bits(self) -> float:
        """The average bits that a quantized weight takes, with scales, zero points and low-rank residuals; 0 where none is."""
        elements = sum(prod(layer.shape) for layer in self.changed)
        return 8 * (sum(layer.bytes for layer in self.changed) + self.residual_bytes) / max(elements, 1)

    @property
    def residual_bytes(self) -> int:
        """Bytes of low-rank residuals, beside the weights."""
        return sum(layer.bytes for layer in self.layers if layer.reason == RESIDUAL)

    def heading(self) -> str:
        """How many of them are quantized, and prepared."""
        total, counts = f"of {sum(layer.reason not in BESIDE for layer in self.layers)} layers", {}
        for how in ("for QAT", "with adapters"):
            counts[how] = sum(layer.prepared == how for layer in self.layers)
        told = [f"{count} {total} prepared {how}" for how, count in counts.items() if count]
        for recipe in dict.fromkeys(layer.recipe for layer in self.layers if layer.recipe):
            told.append(f"{sum(layer.recipe == recipe for layer in self.layers)} {total} train by {recipe}")
        quantized = [f"{len(self.changed)} {total} quantized"] if self.changed or not told else []
        heading = ", ".join((*quantized, *told))
        return "; ".join(filter(None, (heading, self.kv_cache, self.attention)))

    def notes(self) -> list[str]:
        """Of layers that multiply as transformers does: that this is no faster, and what is; of others that outputs differ;
        that few tokens decided."""
        faster = dict.fromkeys(f'kernel="{layer.faster}"' for layer in self.layers if layer.faster)
        named = dict.fromkeys(layer.named for layer in self.layers if layer.named)
        slow = [SLOW.format(" or ".join(faster))] if faster else []
        few = self.few_judges()
        slow += [SLOW_TRAINING] * self.prepared_on_cpu
        slow += [f"  {self.saved_training}"] * bool(self.saved_training)
        return slow + [NAMED.format('" or "'.join(named))] * bool(named) + [f"  {few}"] * bool(few)

    def few_judges(self) -> str:
        """That few held-out tokens decided what calibration kept; "" where enough did, or none had to."""
        return few_judges([layer.calibrated for layer in self.layers if layer.calibrated is not None])


def known_reasons(model: nn.Module) -> dict[str, str]:
    """Reasons of the report that a model has, by names of parameters; of a layer that another has replaced that it was so."""
    modules = dict(model.named_modules())
    result = {}
    for layer in getattr(model, ATTRIBUTE, Report()).layers:
        module = modules.get(layer.name.rpartition(".")[0])
        replaced = getattr(layer, "prepared", "") and module is not None and not preparation(module)
        result[layer.name] = REPLACED if replaced else layer.reason
    return result


def preparation(module: nn.Module) -> str:
    """How step "prepare" has prepared a module; "" where it has not."""
    return module.preparation if isinstance(module, ConvertedModule) else ""


def explain(model: nn.Module) -> Report:
    """Report on every layer of a model: its schemes, the kernel that computes with it, and why.

    Tuned layers list the choice for each range of tokens and direction, with measured times and errors. Reasons of layers that
    were left are those that `quantize_` gave, if it ran on this model.
    """
    check_model(model)
    return described(model, known_reasons(model))


def described(model: nn.Module, reasons: dict[str, str]) -> Report:
    """The report of a model, with these reasons by names of parameters."""
    pruned: dict[str, str] = getattr(model, SPARSITY, {})
    results: dict[str, LayerResult] = getattr(model, CALIBRATION, {})
    layers, known = [], Known()
    for slot in quantizable_parameters(model):
        shape, parameter = tuple(slot.parameter.shape), held(slot.parameter)
        layer = replace(described_layer(slot._replace(parameter=parameter), reasons, known), shape=shape)
        storage = "compressed" if isinstance(parameter, SparseQuantizedTensor) else "dense"
        layers.append(
            replace(
                layer,
                sparsity=_sparsity(pruned.get(layer.name, ""), parameter),
                storage=storage,
                calibrated=results.get(layer.name) if layer.changed else None,
            )
        )
    if any(layer.recipe for layer in layers):
        layers = [replace(one, reason=NOT_TRAINED) if one.reason == NOT_CALLED else one for one in layers]
    beside = [one for one in layers if one.reason in BESIDE]
    layers = [one for one in layers if one.reason not in BESIDE]
    return Report(
        (*layers, *_others(model, reasons), *beside),
        str(getattr(model, KV_CACHE, "")),
        str(getattr(model, ATTENTION, "")),
        any(layer.prepared == "for QAT" for layer in layers) and on_cpu(model),
        "" if any(one.changed or one.prepared or one.recipe for one in layers) else saved_training(model),
    )


def on_cpu(model: nn.Module) -> bool:
    """Whether a parameter of a model is on a CPU."""
    return any(parameter.device.type == "cpu" for parameter in model.parameters())


def held(parameter: torch.Tensor) -> torch.Tensor:
    """The piece that this process has of a quantized weight that several share (a DTensor); all else itself."""
    piece = getattr(parameter, "_local_tensor", None)
    return piece if isinstance(piece, QuantizedTensor) else parameter


def _others(model: nn.Module, reasons: dict[str, str]) -> list[Layer]:
    """What a filter accepted and is none of the modules whose weights are quantized."""
    layers = []
    for path, module in model.named_modules():
        name = first_matrix(module)
        full = "" if name is None else full_name(path, name)
        if name is not None and reasons.get(full) == other_reason(module):
            weight = module.get_parameter(name)
            shape = tuple(weight.shape)
            layers.append(Layer(full, type(module).__name__, shape, "", "", weight.nbytes, reasons[full]))
    return layers


def _sparsity(pruned: str, parameter: torch.Tensor) -> str:
    """How a weight was pruned, and where its scheme has no zero to store what was pruned."""
    if isinstance(parameter, SparseQuantizedTensor):
        return pruned or SPARSE
    if not pruned or not isinstance(parameter, QuantizedTensor) or stores_zero(parameter.recipe.weight):
        return pruned
    return f"{pruned}, whose zeros {parameter.recipe.weight.name} stores as other values"


def stores_zero(scheme: Scheme) -> bool:
    """Whether a weight of 0 is 0 afterwards: the element has a zero, which a zero point, if any, moves to another code."""
    if scheme.zero is not None:
        return scheme.zero.rule == "code"
    return bool(decode(encode(np.zeros(1, np.float32), scheme.element), scheme.element)[0] == 0)


class Multiplied(NamedTuple):
    """What computes with a quantized weight: see `Layer`."""

    kernel: str
    tuned: tuple[Choice, ...]
    families: tuple[Range, ...]
    failures: Mapping[str, str]


class Known(dict[Any, Multiplied]):
    """What was found while one report is made: blocks have weights of the same few forms, of which what computes depends. The
    next report asks again, since kernels load and tuning chooses in between."""

    def of(self, module: nn.Module, weight: QuantizedTensor) -> Multiplied:
        """What computes with a weight of a module."""
        sizes = tuple(
            part if part is None else (part.dtype, part.device, part.shape, part.stride())
            for part in weight.parts.values()
        )
        form = isinstance(module, TABLES), type(weight), weight.meta, tuple(weight.shape), sizes
        if form not in self:
            choices, families = inference_choices(weight), families_of(module, weight)
            self[form] = Multiplied(kernel_of(module, weight), choices, *families)
        return self[form]


def described_layer(slot: Slot, reasons: dict[str, str], known: Known) -> Layer:
    """One line of a report. known: what lines before it have found."""
    full, (_, module, name, parameter) = slot.full, slot
    computed = (
        unsupported_reason(module, name, parameter) if isinstance(module, ParametrizationList) else None
    )
    reason = reasons.get(full, computed or NOT_CALLED)
    if isinstance(module, ConvertedModule):
        reason = module.parameter_reason(name) or reason
    kind, shape = type(module).__name__, tuple(parameter.shape)
    prepared = preparation(module) if name == "weight" else ""
    settings = getattr(module, "low_precision", None)
    trains = settings is not None and (name == "weight" or parameter.dim() == 3)
    recipe = settings.recipe.name if trains and settings is not None else ""
    if not isinstance(parameter, QuantizedTensor):
        chosen = training_choices(module, parameter) if name == "weight" or parameter.dim() == 3 else ()
        return Layer(
            full, kind, shape, "", "", parameter.nbytes, reason, chosen, prepared=prepared, recipe=recipe
        )
    size = sum(part.nbytes for part in parameter.parts.values() if part is not None)
    what, faster, named = (
        known.of(module, parameter),
        named_slow(parameter.recipe),
        named_fast(parameter.recipe),
    )
    return Layer(
        full, kind, shape, str(parameter.recipe), what.kernel, size, reason, what.tuned, prepared=prepared,
        families=what.families, failures=what.failures, faster=faster, named=named,
    )  # fmt: skip


def named_slow(recipe: Recipe) -> str:
    """The kernel that is faster than a recipe's own; "" where it does not name "dequantize" beside quantized inputs."""
    return faster_kernel(recipe) if recipe.kernel == "dequantize" and recipe.activation is not None else ""


def named_fast(recipe: Recipe) -> str:
    """The kernel that a recipe with quantized inputs names, if it computes sums otherwise than transformers; else ""."""
    return "" if recipe.activation is None or recipe.kernel in ("auto", "dequantize") else recipe.kernel


def families_of(module: nn.Module, weight: QuantizedTensor) -> tuple[tuple[Range, ...], dict[str, str]]:
    """What multiplies by the weight of a linear layer on a GPU, by ranges of rows; and what did not load."""
    if isinstance(module, TABLES) or not on_gpu(weight):
        return (), {}
    return families_by_rows(weight if weight.block_axis == -2 else weight.transposed(), weight.dtype)


def training_choices(module: nn.Module, weight: torch.Tensor) -> tuple[Choice, ...]:
    """What was tuned for a layer or experts that train by a recipe, of their lengths as they pad them.

    Of experts that their module multiplies one by one too.
    """
    settings = getattr(module, "low_precision", None)
    if settings is None or weight.dim() not in (2, 3) or weight.is_meta or settings.kernel != "auto":
        return ()
    is_transposed = weight.dim() == 3 and contraction_axis(module, weight) == -2
    (n, k), (_, step_n, step_k) = weight.shape[-2:][:: -1 if is_transposed else 1], settings.steps
    lengths, operands = (n + -n % step_n, k + -k % step_k), training_operands(settings.recipe)
    counts = (weight.shape[0], 1) if weight.dim() == 3 else (0,)
    table = choices_for(weight.device)
    return tuple(choice for experts in counts for choice in table.of_layer(*lengths, operands, experts))


def inference_choices(weight: QuantizedTensor) -> tuple[Choice, ...]:
    """What was tuned for a matrix that is multiplied with."""
    if len(weight.shape) != 2 or weight.is_meta or weight.recipe.kernel != "auto":
        return ()
    n, k = weight.shape
    return choices_for(weight.device).of_layer(n, k, {"inference": (*inference_keys(weight), "")})


def kernel_of(module: nn.Module, weight: QuantizedTensor) -> str:
    """The function that computes with a weight; experts and linear layers sum along their blocks."""
    if isinstance(module, TABLES):
        return "embedding"
    transposed = weight if weight.block_axis == -2 else weight.transposed()
    named = weight.recipe.kernel
    if groups_reason(transposed, weight.dtype) is None:
        count = average_rows_as_stored(transposed.stored, weight.dtype)
        return "fused" if count >= ALL_ROWS else f"fused, up to {count} tokens an expert on average"
    # A model of them may lie on the host, where its products raise and reports do not.
    name = named if named in SPARSE_KERNELS else select_kernel(transposed, weight.dtype)
    if name == SPARSE_INT4:
        from ao_lab.gemm.sparse import MOST_ROWS

        return f"{name}, up to {MOST_ROWS} tokens"
    if name == "dequantize" and isinstance(weight, SparseQuantizedTensor) and on_gpu(weight):
        return SLOWER
    if name != "fused":
        return name
    count = most_fused_rows(transposed, weight.dtype)
    if count >= ALL_ROWS:
        return name
    return f"fused, up to {count} token{'s' * (count > 1)}"


def on_gpu(weight: torch.Tensor) -> bool:
    """Whether products by a weight run on a GPU."""
    return weight.is_cuda


def warn_of_slower(report: Report, names: Iterable[str]) -> None:
    """One warning for those of these layers that are stored as 2:4 and dequantized in every product on a GPU."""
    given = set(names)
    slower = [layer for layer in report.layers if layer.kernel == SLOWER and layer.name in given]
    if not slower:
        return
    schemes = ", ".join(dict.fromkeys(layer.scheme for layer in slower))
    warnings.warn(
        f"{len(slower)} of {len(given)} layers, {slower[0].name} among them, are dequantized in every forward pass and "
        f"slower than bfloat16: no kernel for this GPU reads 2:4 storage of {schemes}. There are kernels for "
        f"Int4WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig and Float8DynamicActivationFloat8WeightConfig; without "
        f"sparsity='2:4' pruned weights use the kernels of dense storage",
        stacklevel=4,
    )


def keep_configuration(
    model: nn.Module, config: Config | FqnToConfig, request: Request | None = None
) -> None:
    """Keep with the model, for its card, what it is quantized by and what was changed in that for a layout."""
    remember_changes(model, getattr(config, "changes", ()))
    if _tells_most(config):
        remember_configuration(model, ", ".join([repr(config), *_arguments_of(request)]))


def _arguments_of(request: Request | None) -> list[str]:
    """The arguments of `quantize_` that are a request, as a call has them; `batches` stands for the data."""
    if request is None:
        return []
    calls = ", ".join(method.call for method in request.methods)
    told = ["calibration=batches"] if request.batches is not None else []
    told += [f"methods=({calls}{',' * (len(request.methods) == 1)})"] if calls else []
    return told + ([f"prefix={request.prefix!r}"] if request.prefix != "quantized" else [])


def _tells_most(config: object) -> bool:
    """Whether a configuration is the one, of the two that two steps were given, which a model card names: the one that trains,
    and the one that quantizes what was observed."""
    prepares = isinstance(config, Config) and config.prepares
    return prepares if hasattr(config, "base_config") else not prepares


__all__ = ["Layer", "Report", "explain", "keep_configuration"]
