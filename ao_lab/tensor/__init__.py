"""`QuantizedTensor`, the one tensor subclass for every scheme, and its operations.

Importing any of it registers all operations and the hooks of FSDP2, so that a tensor has them wherever it comes from.
"""

import torch.distributed

from ao_lab.tensor import fsdp as fsdp
from ao_lab.tensor import lookup_ops as lookup_ops
from ao_lab.tensor import matmul_ops as matmul_ops
from ao_lab.tensor import transforms as transforms
from ao_lab.tensor import value_ops as value_ops
from ao_lab.tensor import view_ops as view_ops

if torch.distributed.is_available():
    from ao_lab.tensor import collectives as collectives
