"""Arms of experiment `calibration` that other projects compute: records of their settings, and of the schemes that they take.

Each runs its own code from a loaded model to a quantized one, at the settings that its documentation calls its defaults and at
the best that it names. Schemes are the same by elements, groups and symmetry; how a scale is chosen and stored is the peer's,
since that is part of its method: bfloat16 scales, zero points of as many bits as an element (hqq: bfloat16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ao_lab.config.recipe import named


@dataclass(frozen=True)
class PeerScheme:
    """What a job says of a scheme. element: "" for integers, else the format of 4-bit floats."""

    bits: int
    group: int
    symmetric: bool
    element: str = ""


@dataclass(frozen=True)
class PeerArm:
    """A peer at some settings.

    peer: the module that is imported, which `driver.py` has a function for. elements: of the schemes that it takes; bits,
    symmetric: of integers. options: of that function. about: what pages say of it. zero_bits: of a zero point; None: those of
    an element. batch: sequences of a step, where that is part of the method.
    """

    peer: str
    options: Mapping[str, Any]
    about: str
    elements: tuple[str, ...] = ("",)
    bits: tuple[int, ...] = (2, 3, 4, 8)
    symmetric: tuple[bool, ...] = (True, False)
    zero_bits: int | None = None
    batch: int | None = None
    sees_data: bool = True

    def takes(self, scheme: PeerScheme | None) -> bool:
        """Whether it quantizes in a scheme."""
        if scheme is None or scheme.element not in self.elements:
            return False
        return bool(scheme.element) or (scheme.bits in self.bits and scheme.symmetric in self.symmetric)


FLOATS = ("", "mxfp4", "nvfp4")
#: Of 4-bit floats, by the format of their scales and the group.
FLOAT_SCHEMES = {
    ("float8_e8m0fnu", 32): PeerScheme(4, 32, True, "mxfp4"),
    ("float8_e4m3fn", 16): PeerScheme(4, 16, True, "nvfp4"),
}
LLM_COMPRESSOR, GPTQMODEL, AUTO_ROUND, HQQ = "llmcompressor", "gptqmodel", "auto_round", "hqq"
#: Compiling takes longer than a small model's steps; what it computes is the same.
EAGER = {"enable_torch_compile": False}
#: Arms by their names in rows.
PEERS: dict[str, PeerArm] = {
    "llm-compressor GPTQ": PeerArm(
        LLM_COMPRESSOR, {"gptq": {}}, "GPTQModifier: blocks of 128, damping 0.01, order static", FLOATS
    ),
    "llm-compressor GPTQ, imatrix": PeerArm(
        LLM_COMPRESSOR,
        {"gptq": {}, "observer": "imatrix_mse"},
        "the same over scales searched with weights of inputs, its best by its own tables",
        FLOATS,
    ),
    "llm-compressor AWQ": PeerArm(
        LLM_COMPRESSOR,
        {"awq": {"duo_scaling": "both"}, "observer": "mse"},
        "AWQModifier with both scalings, over scales searched by squared error",
        FLOATS,
    ),
    "GPTQModel": PeerArm(GPTQMODEL, {}, "QuantizeConfig's defaults: damping 0.05, order by groups"),
    "GPTQModel, mse": PeerArm(GPTQMODEL, {"mse": 2.4}, "the same over ranges searched by the norm 2.4"),
    "auto-round": PeerArm(
        AUTO_ROUND,
        {"iters": 200, **EAGER},
        "SignRound, 200 steps of 8 sequences, not compiled",
        FLOATS,
        batch=8,
    ),
    "auto-round, alg_ext": PeerArm(
        AUTO_ROUND,
        {"iters": 200, "enable_alg_ext": True, **EAGER},
        "the same with its extension: scales searched first, largest errors dropped",
        FLOATS,
        batch=8,
    ),
    "auto-round, best": PeerArm(
        AUTO_ROUND,
        {"iters": 1000, "enable_alg_ext": True, **EAGER},
        "its recipe best, 1,000 steps, with the extension",
        FLOATS,
        batch=8,
    ),
    "auto-round, no steps": PeerArm(
        AUTO_ROUND, {"iters": 0, **EAGER}, "its rounding over searched scales, without steps", FLOATS, batch=8
    ),
    "hqq library": PeerArm(
        HQQ, {}, "HQQLinear, groups along inputs", symmetric=(False,), zero_bits=16, sees_data=False
    ),
}
#: Those that run when nothing is named: a thousand steps are asked for by name.
DEFAULT = tuple(name for name in PEERS if name != "auto-round, best")
#: How a peer gets into an interpreter, beside torch. The versions are those that were tried.
INSTALL = {
    LLM_COMPRESSOR: "pip install llmcompressor==0.14.0.1",
    GPTQMODEL: "pip install --no-build-isolation gptqmodel==7.7.0",
    AUTO_ROUND: "pip install auto-round==0.16.1",
    HQQ: "pip install hqq==0.2.8.post1",
}


def peer_scheme(weights: str) -> PeerScheme | None:
    """What peers quantize in where a case names this scheme; None where they have no such scheme.

    Integers in groups along the inputs (zero points, if any, are integers too), MXFP4 and NVFP4, however the scheme rounds and
    stores its scales.
    """
    scheme = named(weights)
    group = 0 if scheme is None else scheme.scale.block
    if scheme is None or not isinstance(group, int) or group <= 0:
        return None
    if scheme.format.name == "float4_e2m1fn":
        return FLOAT_SCHEMES.get((scheme.scale.storage, group))
    zero, bits = scheme.zero, scheme.format.bits
    if scheme.format.name != f"int{bits}" or (zero is not None and zero.rule != "code"):
        return None
    return PeerScheme(bits, group, zero is None)


def bits_per_weight(arm: PeerArm, scheme: PeerScheme) -> float:
    """Stored bits of a weight, scales and zero points included; an outer scale of a matrix is none to speak of."""
    scale = 8 if scheme.element else 16
    zero = 0 if scheme.symmetric else scheme.bits if arm.zero_bits is None else arm.zero_bits
    return scheme.bits + (scale + zero) / scheme.group
