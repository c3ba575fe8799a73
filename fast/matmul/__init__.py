"""Matrix products and linear layers of torch tensors."""
