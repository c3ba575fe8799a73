"""Methods of experiment `qat` as data, and how long and on what text each scale of it trains.

A new method is one line of METHODS: a configuration of `quantize_`, whether its scales are learned (only float32 scales can
be), and its target, if it has one.
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
from experiments.models.activation_schemes import setting_name
from experiments.models.language_model import ModelSettings
from experiments.models.train import TrainSettings
from experiments.qat.targets import TARGETS
from experiments.runs.settings import Settings


@dataclass(frozen=True)
class Method:
    """A configuration to train for and to quantize with, and its options in `QATConfig`."""

    config: Config
    learn_scales: bool = False
    target: float | None = None

    @property
    def name(self) -> str:
        """The method of its rows: the scheme of the weights."""
        return self.config.recipe().weight.name

    @property
    def setting(self) -> str:
        """The setting of its rows: how inputs of layers are quantized."""
        activation = self.config.recipe().activation
        return setting_name(None if activation is None else activation.name)

    def step(self, step: str) -> QATConfig:
        """The configuration of step "prepare" or "convert"."""
        if step == "convert" or not self.learn_scales:
            return QATConfig(self.config, step=step)
        return QATConfig(self.config, step=step, learn_scales=True, scale_start="error")


METHODS = (
    Method(Int8DynamicActivationIntxWeightConfig("int4", PerGroup(32)), True, TARGETS[4]),
    Method(Int8DynamicActivationIntxWeightConfig("int4", PerGroup(256)), True, TARGETS[4]),
    Method(Int4WeightOnlyConfig(128), True, TARGETS[4]),
    Method(IntxWeightOnlyConfig("int3", PerGroup(32)), True, TARGETS[3]),
    Method(IntxWeightOnlyConfig("int3", PerGroup(128)), True, TARGETS[3]),
    Method(IntxWeightOnlyConfig("int2", PerGroup(32)), True),
    Method(LowBitWeightOnlyConfig(1.58, PerGroup(32)), True),
    Method(MXDynamicActivationMXWeightConfig(activation_dtype="float4_e2m1fn", weight_dtype="float4_e2m1fn")),
    Method(NVFP4DynamicActivationNVFP4WeightConfig()),
)
#: Few enough for two cores.
QUICK_METHODS = tuple(
    method for method in METHODS if method.name in ("int4_g256", "int3_g128", "mxfp4_rceil")
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One scale of the experiment.

    start: training of the common initial model; None: that of the other experiments.
    seeds: of the text that is drawn for the compared training.
    steps, batch, rate, scale_rate: of the compared training, with and without QAT, by AdamW, down to a rate of 0.
    windows, evaluations: held-out files with a window in each evaluation, and the number of evaluations.
    """

    methods: tuple[Method, ...]
    seeds: int
    start: TrainSettings | None
    steps: int
    batch: int
    rate: float
    scale_rate: float
    windows: int
    evaluations: int = 1

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"an interval over seeds needs at least two, got {self.seeds}")

    def training(self, settings: Settings, seed: int) -> TrainSettings:
        """The training of a seed, the same for the baseline and for every method in step "prepare"."""
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
            # Other text than in the training of the initial model.
            seed=TRAINING_SEED + seed,
        )


#: First seeds of the compared training and of its evaluations, far above those of the initial training and of the evaluation
#: that chose the learning rates.
TRAINING_SEED, EVALUATION_SEED = 2000, 100
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
        # Long enough that further training changes little: two runs on different text then end alike, and the loss by
        # quantization exceeds the noise (after 600 steps models differ by half the loss of 4 bits).
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
        evaluations=8,
    ),
}
