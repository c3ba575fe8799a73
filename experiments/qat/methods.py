"""What experiment `qat` trains, as data: the methods, and how long and on what each scale of it trains.

A new method is one line of METHODS: a configuration of `quantize_`, whether its scales are learned (only float32 scales can
be), and the bar, if it has one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ao_lab import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    LowBitWeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    PerGroup,
    QATConfig,
)
from ao_lab.config.base import Config
from experiments.harness.settings import Settings
from experiments.models.activation_schemes import setting_name
from experiments.models.language_model import ModelSettings
from experiments.models.train import TrainSettings

#: Percent of the loss that training is to recover, by bits of the weights.
BARS = {4: 90.0, 3: 80.0}


@dataclass(frozen=True)
class Method:
    """A configuration to train for and to quantize by, and what `QATConfig` says beside it."""

    config: Config
    learn_scales: bool = False
    bar: float | None = None

    @property
    def name(self) -> str:
        """As rows call it: the scheme of the weights."""
        return self.config.recipe().weight.name

    @property
    def setting(self) -> str:
        """As rows call what happens to the inputs of layers."""
        activation = self.config.recipe().activation
        return setting_name(None if activation is None else activation.name)

    def step(self, step: str) -> QATConfig:
        """The configuration of step "prepare" or "convert"."""
        if step == "convert" or not self.learn_scales:
            return QATConfig(self.config, step=step)
        return QATConfig(self.config, step=step, learn_scales=True, scale_start="error")


METHODS = (
    Method(Int8DynamicActivationIntxWeightConfig("int4", PerGroup(32)), True, BARS[4]),
    Method(Int8DynamicActivationIntxWeightConfig("int4", PerGroup(256)), True, BARS[4]),
    Method(Int4WeightOnlyConfig(128), True, BARS[4]),
    Method(IntxWeightOnlyConfig("int3", PerGroup(32)), True, BARS[3]),
    Method(IntxWeightOnlyConfig("int3", PerGroup(128)), True, BARS[3]),
    Method(IntxWeightOnlyConfig("int2", PerGroup(32)), True),
    Method(LowBitWeightOnlyConfig(1.58, PerGroup(32)), True),
    Method(MXDynamicActivationMXWeightConfig(activation_dtype="float4_e2m1fn", weight_dtype="float4_e2m1fn")),
    Method(NVFP4DynamicActivationNVFP4WeightConfig()),
)
#: What two cores have time for.
QUICK_METHODS = tuple(
    method for method in METHODS if method.name in ("int4_g256", "int3_g128", "mxfp4_rceil")
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One scale of the experiment.

    start: how the model is trained that all go on from. None: as that of the other experiments.
    seeds: of the text that is drawn for the training that is compared.
    steps, batch, rate, scale_rate: of that training, plain and quantized alike, by AdamW, down to a rate of nothing.
    windows, exams: of how many held-out files there is a window in each exam, and how many exams.
    """

    methods: tuple[Method, ...]
    seeds: int
    start: TrainSettings | None
    steps: int
    batch: int
    rate: float
    scale_rate: float
    windows: int
    exams: int = 1

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"an interval over seeds needs at least two, got {self.seeds}")

    def plain(self, settings: Settings, seed: int) -> TrainSettings:
        """The training of a seed, which the baseline goes through as it is, and every method in step "prepare"."""
        start = self.start or settings.train
        return replace(
            start,
            start=start,
            steps=self.steps,
            batch=self.batch,
            warmup=max(1, self.steps // 20),
            matrix_rate=None,
            rate=self.rate,
            last_rate=0.0,
            scale_rate=self.scale_rate,
            # Other text than the same seed drew before.
            seed=FURTHER + seed,
        )


#: Seeds of the compared training, and of its exams, lie this far above those of what went before, and of what rates were
#: chosen by.
FURTHER, UNSEEN = 2000, 100
PLANS = {
    "quick": Plan(
        methods=QUICK_METHODS,
        seeds=2,
        start=None,
        steps=30,
        batch=4,
        rate=3e-4,
        scale_rate=5e-3,
        windows=40,
    ),
    "full": Plan(
        methods=METHODS,
        seeds=5,
        # Long enough that further training changes little: two runs on different text then end alike, and what quantization
        # costs is not lost among what chance does (after 600 steps models differ by half of what 4 bits cost).
        start=TrainSettings(
            model=ModelSettings(width=512, layers=3, heads=8, kv_heads=4, feed_forward=1536, context=512),
            batch=32,
            steps=3000,
            warmup=200,
            matrix_rate=None,
            rate=2e-3,
        ),
        steps=1000,
        batch=32,
        rate=3e-4,
        scale_rate=5e-3,
        windows=70,
        exams=8,
    ),
}
