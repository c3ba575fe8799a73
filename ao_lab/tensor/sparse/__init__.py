"""2:4 storage of quantized weights: `SparseQuantizedTensor` and its operations, which importing this registers."""

import torch.distributed

from ao_lab.tensor.sparse import fsdp as fsdp
from ao_lab.tensor.sparse import ops as ops
from ao_lab.tensor.sparse import view_ops as view_ops
from ao_lab.tensor.sparse.sparse_tensor import SparseQuantizedTensor, rebuilt_sparse

if torch.distributed.is_available():
    from ao_lab.tensor.sparse import collectives as collectives

__all__ = ["SparseQuantizedTensor", "rebuilt_sparse"]
