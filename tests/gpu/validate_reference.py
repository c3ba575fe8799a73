"""On a GPU: the reference on CUDA tensors, and under JAX, against NumPy bit for bit.

Run from the root of a clone on a machine with a CUDA device: `PYTHONPATH=. python tests/gpu/validate_reference.py`. Every
scheme and every format with every rounding mode, on uniformly random bit patterns, normal numbers and subnormals. Writes a line
of reports/gpu/validations.csv; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch

import reference
from experiments.harness.revision import commit
from experiments.runs.validations import record, validation
from reference.formats.encode import MODES

SHAPE = (256, 1024)
#: Values that were compared so far.
COMPARED = [0]


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, SHAPE, dtype=np.uint32)
    normal = rng.standard_normal(SHAPE) * np.exp(4 * rng.standard_normal((SHAPE[0], 1)))
    sparse = normal.astype(np.float32)
    sparse[::16, 5], sparse[1::32, 70] = np.nan, np.inf
    return {
        "bits": patterns.view(np.float32),
        "normal": normal.astype(np.float32),
        "subnormal": (patterns & 0x807FFFFF).view(np.float32),
        "few_nonfinite": sparse,
    }


def host(value: Any) -> np.ndarray | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.view(torch.int16) if value.dtype in (torch.uint16, torch.bfloat16) else value
        return value.numpy()
    return np.asarray(value)


def different(a: Any, b: Any) -> int:
    a, b = host(a), host(b)
    if a is None or b is None:
        return int(a is not b)
    COMPARED[0] += a.size
    if a.shape != b.shape or a.dtype.itemsize != b.dtype.itemsize:
        return -1
    unsigned = f"u{a.dtype.itemsize}"
    return int((np.ascontiguousarray(a).view(unsigned) != np.ascontiguousarray(b).view(unsigned)).sum())


def parts(q: Any) -> list[Any]:
    return [q.codes, q.scale, q.outer, q.zero, reference.dequantize(q)]


def check_schemes(report: dict[str, Any]) -> None:
    for name in reference.SCHEMES:
        for kind, x in inputs().items():
            expected = parts(reference.quantize(x, name))
            got = parts(reference.quantize(torch.from_numpy(x).cuda(), name))
            counts = [different(a, b) for a, b in zip(got, expected, strict=True)]
            report["schemes"][f"{name}/{kind}"] = counts
            if any(counts):
                print(
                    "cuda differs", name, kind, "codes, scale, outer, zero, dequantized:", counts, flush=True
                )


def check_formats(report: dict[str, Any]) -> None:
    words = reference.random_bits(SHAPE, seed=7)
    for name, fmt in reference.FORMATS.items():
        for mode in MODES if fmt.kind != "codebook" else ("nearest_even",):
            extra = {"random_bits": words} if mode == "stochastic" else {}
            cuda = {key: torch.from_numpy(value).cuda() for key, value in extra.items()}
            count = 0
            for x in inputs().values():
                expected = reference.encode(x, name, rounding=mode, **extra)
                count += different(
                    reference.encode(torch.from_numpy(x).cuda(), name, rounding=mode, **cuda), expected
                )
            report["formats"][f"{name}/{mode}"] = count
            if count:
                print("cuda differs", name, mode, count, flush=True)


def check_jax(report: dict[str, Any], seconds: float) -> None:
    import jax
    import jax.numpy as jnp

    start = time.time()
    names = [
        name for name in reference.SCHEMES if "." not in name and "int5" not in name and "int6" not in name
    ]
    for name in names:
        if time.time() - start > seconds:
            break
        function = jax.jit(lambda v, name=name: parts(reference.quantize(v, name)))
        total = 0
        for kind, x in inputs().items():
            array = jax.lax.bitcast_convert_type(jnp.asarray(x.view(np.uint32)), jnp.float32)
            counts = [
                different(a, b)
                for a, b in zip(function(array), parts(reference.quantize(x, name)), strict=True)
            ]
            total += sum(map(abs, counts))
            if any(counts):
                print("jax differs", name, kind, counts, flush=True)
        report["jax"][name] = total
    report["jax_device"] = str(jax.devices()[0])


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    commit()  # of the code that is tested, whatever happens to the tree meanwhile
    report: dict[str, Any] = {"schemes": {}, "formats": {}, "jax": {}, "gpu": torch.cuda.get_device_name()}
    report["versions"] = {"torch": torch.__version__, "numpy": np.__version__}
    start = time.time()
    check_formats(report)
    check_schemes(report)
    print(f"torch on CUDA: {time.time() - start:.0f} s", flush=True)
    check_jax(report, 150.0)
    failed = [key for key, value in report["schemes"].items() if any(value)]
    failed += [key for table in ("formats", "jax") for key, value in report[table].items() if value]
    report["failed"] = failed
    print(json.dumps({"schemes": len(report["schemes"]), "formats": len(report["formats"]), "jax": len(report["jax"]),
                      "jax_device": report["jax_device"], "failed": failed}))  # fmt: skip
    tables = [report[name] for name in ("schemes", "formats", "jax")]
    counts = [
        sum(map(abs, one)) if isinstance(one, list) else abs(one)
        for table in tables
        for one in table.values()
    ]
    record([validation("reference on CUDA and JAX", len(counts), COMPARED[0], sum(counts), len(failed))])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
