"""The GPU ledger: what a GPU said of each function of `fast` that has kernels, and of which code."""
