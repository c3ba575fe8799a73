"""Recipes under the names of others: llm-compressor's modifiers and `oneshot`, torchao's configurations of such methods.

    from ao_lab.quantization.aliases import GPTQModifier, SmoothQuantModifier, oneshot
    oneshot(model, batches, [SmoothQuantModifier(0.8), GPTQModifier(scheme="W4A16", ignore=["lm_head"])])

The classes have the arguments of llm-compressor 0.14 and torchao 0.18, and objects of these packages are taken too, by the
names of their classes. Each is translated to a configuration, a filter and methods of this package (`translated`), which
compute what their own documentation says: pairs of layers are found by trying, GPTQ's scales are searched, damping of None is
chosen on held-out tokens. An argument that has no meaning here is a ValueError, unless it is at its default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, cast

from torch import nn

from ao_lab.calibration.methods import AWQ, GPTQ, HELD_OUT, Method, Smooth, StaticKV
from ao_lab.config import classes
from ao_lab.config.base import PATTERN, Config, SchemeConfig, compiled_pattern
from ao_lab.config.granularity import PerRow
from ao_lab.config.recipe import integer_scheme
from ao_lab.kv_cache.static_scales import cache_scheme_of
from ao_lab.quantization.api import quantize_
from ao_lab.quantization.report import Report
from ao_lab.transforms.plan import Filter
from reference.arrays.namespace import choice

COMPRESSED = "compressed-tensors"


def _refuse(owner: object, **given: tuple[Any, Any, str]) -> None:
    """ValueError for arguments that are not at their defaults: by name (value, default, what to do instead)."""
    for name, (value, default, instead) in given.items():
        if value != default:
            raise ValueError(
                f"{type(owner).__name__}: {name}={value!r:.60} is not supported in ao_lab; omit it"
                f"{instead and ': '}{instead}"
            )


def _presets() -> dict[str, Callable[[], Config]]:
    """compressed-tensors' presets, as configurations whose folders its readers compute."""
    return {
        "W4A16": lambda: classes.Int4WeightOnlyConfig(group_size=128),
        "W8A16": lambda: SchemeConfig(scheme=integer_scheme(8, 128, asymmetric=False)),
        "W8A8": classes.Int8DynamicActivationInt8WeightConfig,
        "INT8": classes.Int8DynamicActivationInt8WeightConfig,
        "FP8_DYNAMIC": lambda: classes.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        "NVFP4": classes.NVFP4DynamicActivationNVFP4WeightConfig,
        "NVFP4A16": classes.NVFP4WeightOnlyConfig,
        "MXFP4A16": lambda: SchemeConfig(scheme="mxfp4"),
        "MXFP8A16": lambda: SchemeConfig(scheme="mxfp8_e4m3"),
    }


@dataclass(kw_only=True)
class QuantizationModifier:
    """Weights and inputs by a preset of compressed-tensors ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4", ...), rounded to nearest.

    targets: "Linear", names, or patterns "re:...". ignore: the same, of what stays. kv_cache_scheme: of 8 bits, static.
    """

    config_groups: Any = None
    targets: str | list[str] = "Linear"
    ignore: str | list[str] = field(default_factory=list)
    scheme: Any = None
    kv_cache_scheme: Any = None
    weight_observer: str | None = None
    input_observer: str | None = None
    output_observer: str | None = None
    observer: Any = None
    bypass_divisibility_checks: bool = False

    @property
    def methods(self) -> tuple[Method, ...]:
        """Those that find codes, and scales of a cache."""
        return (*self.finding, *self._cache())

    @property
    def finding(self) -> tuple[Method, ...]:
        """Those that find scales and codes."""
        return ()

    def _cache(self) -> tuple[Method, ...]:
        given = self.kv_cache_scheme
        if given is None:
            return ()
        named = (
            given if isinstance(given, dict) else getattr(given, "__dict__", {"type": type(given).__name__})
        )
        plain = {name: getattr(value, "value", value) for name, value in named.items() if value is not None}
        scheme = cache_scheme_of({"type": "float", "num_bits": 8, "strategy": "tensor", **plain})
        if scheme is None:
            raise ValueError(
                f"kv_cache_scheme is static and symmetric, float or int of 8 bits, a tensor or an attn_head; got {given!r:.100}"
            )
        element, per = scheme
        return (StaticKV(per, element),)

    def config(self) -> Config:
        """The configuration of the preset, as compressed-tensors' readers compute it."""
        _refuse(
            self,
            config_groups=(self.config_groups, None, "give a preset as scheme=, or FqnToConfig to quantize_"),
            weight_observer=(self.weight_observer, None, "Clip() searches scales"),
            input_observer=(self.input_observer, None, "a static configuration has statistic="),
            output_observer=(self.output_observer, None, ""),
            observer=(self.observer, None, ""),
            bypass_divisibility_checks=(self.bypass_divisibility_checks, False, ""),
        )
        if not isinstance(self.scheme, str):
            raise ValueError(
                f"{type(self).__name__}: scheme is the name of a preset, got {self.scheme!r:.60}"
            )
        presets = _presets()
        found = presets[choice(self.scheme.upper(), tuple(presets), "scheme")]()
        activation = found.recipe().activation
        # An outer scale of inputs is their own here, which its readers do not find as they come.
        return found if activation is not None and activation.outer else found.for_layout(COMPRESSED)

    def filter_fn(self) -> Filter:
        """Which modules are meant; ValueError for a pattern that is no regular expression."""
        targets, ignored = _matching(self.targets), _matching(self.ignore or ())
        return lambda module, name: (
            isinstance(module, nn.Linear) and targets(module, name) and not ignored(module, name)
        )


@dataclass(kw_only=True)
class GPTQModifier(QuantizationModifier):
    """The same, with codes by GPTQ. actorder: "static" (or "weight") takes columns of large inputs first, None as they are.

    dampening_frac: a share of the Hessian's mean diagonal; None: chosen on held-out tokens.
    """

    block_size: int = 128
    dampening_frac: float | None = 0.01
    actorder: Any = "static"
    batched_quantization: Any = "auto"

    @property
    def finding(self) -> tuple[Method, ...]:
        """GPTQ."""
        _refuse(
            self,
            block_size=(self.block_size, 128, "matmuls of 128 columns change no rule"),
            batched_quantization=(self.batched_quantization, "auto", ""),
        )
        given = getattr(self.actorder, "value", self.actorder)
        orders = {None: "stored", "static": "activation", "weight": "activation"}
        if given not in orders:
            raise ValueError(
                f"GPTQModifier: actorder is 'static' or None, got {given!r}: other orders store groups that are no blocks"
            )
        return (GPTQ(orders[given], HELD_OUT if self.dampening_frac is None else self.dampening_frac),)


@dataclass(kw_only=True)
class AWQModifier:
    """Channels scaled by powers of the inputs' mean magnitude, n_grid of them tried. Beside a modifier that quantizes."""

    mappings: Any = None
    offload_device: Any = None
    duo_scaling: Any = True
    n_grid: int = 20

    @property
    def methods(self) -> tuple[Method, ...]:
        """AWQ."""
        _refuse(
            self,
            mappings=(self.mappings, None, "pairs of layers are found by trying"),
            offload_device=(self.offload_device, None, "quantize_ and oneshot have offload="),
            duo_scaling=(self.duo_scaling, True, "factors are of the inputs alone"),
        )
        return (AWQ(self.n_grid),)


@dataclass
class SmoothQuantModifier:
    """Channels scaled so that inputs and weights share their range. Beside a modifier that quantizes."""

    smoothing_strength: float = 0.5
    mappings: Any = None
    ignore: list[str] | None = None
    num_calibration_steps: int | None = None
    calibration_function: Any = None
    algorithm: str = "smoothquant"

    @property
    def methods(self) -> tuple[Method, ...]:
        """Smooth."""
        _refuse(
            self,
            mappings=(self.mappings, None, "pairs of layers are found by trying"),
            ignore=(self.ignore or None, None, "a pair is smoothed where that helps"),
            num_calibration_steps=(self.num_calibration_steps, None, "give fewer batches"),
            calibration_function=(self.calibration_function, None, "give batches"),
            algorithm=(self.algorithm, "smoothquant", "AWQModifier is another one"),
        )
        return (Smooth(self.smoothing_strength),)


def _matching(names: str | Iterable[str]) -> Filter:
    """Whether one of these names, classes or patterns is a module's."""
    plain = {names} if isinstance(names, str) else set(names)
    patterns = [compiled_pattern(one) for one in plain if one.startswith(PATTERN)]
    return lambda module, name: (
        not plain.isdisjoint((name, type(module).__name__)) or any(one.match(name) for one in patterns)
    )


@dataclass(kw_only=True)
class GPTQConfig:
    """torchao's: GPTQ of a base configuration. Batches come with the call, so that there are no steps."""

    step: Any = None
    base_config: Any = None
    percdamp: float = 0.01
    gptq_quantize_block_size: int = 256

    @property
    def methods(self) -> tuple[Method, ...]:
        """GPTQ, columns as stored."""
        _refuse(self, gptq_quantize_block_size=(self.gptq_quantize_block_size, 256, "blocks change no rule"))
        return (GPTQ("stored", self.percdamp),)


@dataclass
class AWQConfig:
    """torchao's: AWQ before a base configuration."""

    base_config: Any
    step: Any = None
    scale_search_space_size: int = 20

    @property
    def methods(self) -> tuple[Method, ...]:
        """AWQ."""
        return (AWQ(self.scale_search_space_size),)


@dataclass
class SmoothQuantConfig:
    """torchao's: SmoothQuant before a base configuration. use_running_absmax: statistics here always run."""

    base_config: Any
    step: Any = None
    alpha: float | None = 0.5
    use_running_absmax: bool = False

    @property
    def methods(self) -> tuple[Method, ...]:
        """Smooth."""
        if self.alpha is None:
            raise ValueError("SmoothQuantConfig: alpha=None is not supported in ao_lab; 0.5 is usual")
        return (Smooth(self.alpha),)


MODIFIERS = (QuantizationModifier, GPTQModifier, AWQModifier, SmoothQuantModifier)
CONFIGS = (GPTQConfig, AWQConfig, SmoothQuantConfig)


class Translated(NamedTuple):
    """What `quantize_` takes: a configuration, a filter or None, methods."""

    config: Config
    filter_fn: Filter | None
    methods: tuple[Method, ...]


def translated(recipe: Any) -> Translated:
    """A recipe in ao_lab's terms: one of torchao's configurations, or one or several modifiers.

    TypeError for other objects; ValueError for arguments without a meaning here, and where not exactly one modifier quantizes.
    """
    parts = [_ours(one) for one in (recipe if isinstance(recipe, (list, tuple)) else [recipe])]
    if len(parts) == 1 and isinstance(parts[0], CONFIGS):
        return _of_torchao(parts[0])
    if any(isinstance(one, CONFIGS) for one in parts):
        raise ValueError(
            "a configuration of torchao cannot be combined; give methods=(AWQ(), GPTQ()) to quantize_ for several"
        )
    quantizing = [one for one in parts if isinstance(one, QuantizationModifier)]
    if len(quantizing) != 1:
        raise ValueError(
            f"one modifier of a recipe quantizes, QuantizationModifier or GPTQModifier; got {len(quantizing)}"
        )
    methods = tuple(method for one in parts for method in one.methods)
    return Translated(quantizing[0].config(), quantizing[0].filter_fn(), methods)


def _of_torchao(config: Any) -> Translated:
    step = getattr(config.step, "value", config.step)
    if step not in (None, "convert"):
        raise ValueError(
            f"{type(config).__name__}: step={step!r} leaves the data to your own loop; give batches to one call, without step"
        )
    return Translated(_base(config.base_config), None, config.methods)


def _base(config: Any) -> Config:
    """A base configuration; of torchao's own the one of that name with the same arguments."""
    if isinstance(config, Config):
        return config
    kind: Any = getattr(classes, type(config).__name__, None)
    if kind is None or not is_dataclass(config):
        raise TypeError(
            f"base_config is a configuration such as Int4WeightOnlyConfig, got {type(config).__name__}"
        )
    known, default = {one.name for one in fields(kind)}, cast(Any, type(config))()
    given = {one.name: (getattr(config, one.name), getattr(default, one.name)) for one in fields(config)}
    _refuse(config, **{name: (*pair, "") for name, pair in given.items() if name not in known})
    return kind(**{name: value for name, (value, usual) in given.items() if value != usual})  # type: ignore[no-any-return]


def _ours(one: Any) -> Any:
    """A modifier or configuration of ours; of another package's the one of its class's name, with its arguments."""
    kinds = {kind.__name__: kind for kind in (*MODIFIERS, *CONFIGS)}
    if isinstance(one, tuple(kinds.values())):
        return one
    kind: Any = kinds.get(type(one).__name__)
    if kind is None:
        raise TypeError(f"a recipe holds {', '.join(kinds)}; got {type(one).__name__}: {one!r:.60}")
    given = {part.name: getattr(one, part.name) for part in fields(kind) if hasattr(one, part.name)}
    # A `Sentinel` of llm-compressor stands for the default.
    return kind(**{name: value for name, value in given.items() if type(value).__name__ != "Sentinel"})


def oneshot(
    model: nn.Module,
    dataset: Iterable[Any] | None,
    recipe: Any,
    *,
    num_calibration_samples: int | None = None,
    **options: Any,
) -> Report:
    """`quantize_` by a recipe of others: llm-compressor's `oneshot` on a model in memory.

    dataset: batches, as `calibration=` of `quantize_` takes them (tokens, not texts); None where no method reads data.
    num_calibration_samples: so many batches of them. options: others of `quantize_` (resume, offload, device, progress).
    """
    found = translated(recipe)
    if isinstance(dataset, Iterable) and num_calibration_samples is not None:
        dataset = _first(dataset, num_calibration_samples)
    reads = any(method.calibrates for method in found.methods)
    return quantize_(
        model,
        found.config,
        found.filter_fn,
        calibration=dataset if reads else None,
        methods=found.methods,
        **options,
    )


def _first(batches: Iterable[Any], count: int) -> Sequence[Any]:
    return [batch for _, batch in zip(range(count), batches, strict=False)]


__all__ = [
    "AWQConfig", "AWQModifier", "GPTQConfig", "GPTQModifier", "QuantizationModifier", "SmoothQuantConfig",
    "SmoothQuantModifier", "oneshot", "translated",
]  # fmt: skip
