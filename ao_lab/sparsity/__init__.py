"""N:M sparsity of a model's weights: `sparsify_`, its configuration, and what it reports."""
