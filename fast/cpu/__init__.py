"""What runs on CPU tensors beside the reference: torch operations on tiles that stay in cache, with the reference's bits."""
