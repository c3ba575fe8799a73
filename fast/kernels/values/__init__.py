"""A matrix's blocks along rows and along columns from one read, both in its own layout: values, or values and codes."""
