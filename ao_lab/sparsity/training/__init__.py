"""Training with N:M sparse weights. Importing any of it registers what `sparsify_` does for a `SparseTrainingConfig`."""

from ao_lab.sparsity.training import api as api
