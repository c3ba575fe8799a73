"""What is asked of the memory of a quantized weight, whose parts have memory and which itself has none.

Answers of torch's own are those of a tensor without memory: an address of 0, the same for all weights, by which libraries take
two weights for one, and a storage whose use ends in an error about Python. Here the address is that of the codes, and who asks
for a storage or for an array learns what to call. `reshape` copies where there is no view, as it does of dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

Tensor = torch.Tensor


def address(weight: Any) -> int:
    """Where the codes lie: two weights of one address are one weight, 0 for one on the meta device."""
    pointer: int = weight.codes.data_ptr()
    return pointer


def refuse_storage(weight: Any, *_: Any, **__: Any) -> NoReturn:
    """ValueError: libraries that write a tensor's storage cannot write one of several parts."""
    raise ValueError(
        f"{weight!r} is several tensors, without one storage that safetensors or accelerate could write. Save the model by "
        f"ao_lab.save_pretrained(model, folder), or model.save_pretrained(folder) of transformers; what is in training, and a "
        f"state dict, by torch.save, or accelerate's save_state and save_model with safe_serialization=False"
    )


def refuse_array(weight: Any, *_: Any, **__: Any) -> NoReturn:
    """TypeError: an array of the codes would not be the values."""
    raise TypeError(
        f"{weight!r} is no NumPy array, and is not offloaded to disk as one: dequantize() gives its values, "
        f"accelerate.cpu_offload keeps quantized weights in host memory"
    )


def reshaped(weight: Any, *args: Any, **kwargs: Any) -> Any:
    """A view where the parts can be viewed so, as `view` has it, else a dense copy: `reshape` may copy."""
    try:
        return Tensor.reshape(weight, *args, **kwargs)
    except ValueError:
        return Tensor.reshape(weight.dequantize(), *args, **kwargs)


#: Functions of torch that are answered here, by the function, where a weight is the first argument.
ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.data_ptr: address,
    # What cannot use `untyped_storage()`, which tracers look at, asks for this one next.
    Tensor.storage: refuse_storage,
    Tensor.reshape: reshaped,
    torch.reshape: reshaped,
    Tensor.numpy: refuse_array,
    Tensor.__array__: refuse_array,
}

__all__ = ["ANSWERS", "address", "refuse_array", "refuse_storage", "reshaped"]
