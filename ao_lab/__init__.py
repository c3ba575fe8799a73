"""ao_lab: a laboratory for low-precision deep learning.

Every number format and every algorithm has a bit-exact specification in `reference`, for NumPy, JAX and torch alike. This
package is what users import: the names of the specification, `quantize_` with its configurations and saved models for torch,
`ao_lab.jax` with kernels for JAX arrays on GPUs, `ao_lab.testing` with Hypothesis strategies for the inputs that break
kernels, and the command line `ao-lab`.

Nothing is imported before it is used: `import ao_lab` takes milliseconds and needs neither torch nor JAX. The public names
and the modules that define them stand in `__init__.pyi`, which type checkers read, and `__getattr__` when a name is first
used.

Each folder is one capability, and imports those below it alone (a contract in pyproject.toml sees to that):

    cli            commands; install, testing, eval, compile, jax and interop stand at the side
    probe          `probe_`, `Probe`: what low precision costs each layer, on data and in training
    choose         `choose_`: which configuration each layer gets under a budget of bytes or time
    clients        files of other programs: GGUF, ONNX
    checkpoint     saved models: io < export < records < experts < formats < api < transformers < streaming
    qat            quantization-aware training, adapters
    sparsity       `sparsify_`: N:M pruning of linear layers, by scores that calibration feeds
    quantization   `quantize_`: which weights, by which configuration; a configuration registers its transform
    calibration    what is kept of the inputs of layers, and the configurations that need it
    transforms     what every change of a model goes through: selection of layers, plan, report, undoing, data block by block
    tensor         `QuantizedTensor`: its operations register themselves
    gemm           which kernel computes a product
    config         configurations, recipes
"""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from typing import Any

from ao_lab.install import packages, transformers_hook, versions
from ao_lab.install.versions import __version__ as __version__

# Said here, once and at once: a user's file in the place of one of our packages would fail strangely later.
packages.check(*packages.PACKAGES)
packages.install()

#: Public submodules, with the library that each needs. `from ao_lab import *` leaves them out: `jax` would hide the library.
SUBMODULES = {"jax": "jax", "optim": "torch", "plot": "matplotlib", "testing": "hypothesis"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in SUBMODULES:
        from ao_lab.install.extras import needed

        needed(SUBMODULES[name])  # says how to install it where it is missing
        return importlib.import_module(f"ao_lab.{name}")
    if name.startswith("__") and name != "__all__":
        raise _unknown(name)
    if name == "HOMES":
        value: Any = packages.homes()
    elif name == "__all__":
        value = sorted([*packages.homes(), "__version__"])
    elif name in packages.homes():
        value = packages.public(name)
    else:
        raise _unknown(name)
    globals()[name] = value
    versions.check_loaded()
    return value


def _unknown(name: str) -> AttributeError:
    """With the nearest public names; and the name and the module, by which tracebacks suggest one."""
    close = [] if name.startswith("_") else get_close_matches(name, [*packages.homes(), *SUBMODULES])
    told = f"; the nearest {'is' if len(close) == 1 else 'are'} {', '.join(close)}" if close else ""
    return AttributeError(
        f"module 'ao_lab' has no attribute {name!r}{told}", name=name, obj=sys.modules[__name__]
    )


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted([*__getattr__("__all__"), *SUBMODULES])


# Last: where transformers has been imported before, this imports modules that ask for the names above.
transformers_hook.install()
