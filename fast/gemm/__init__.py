"""Which family of kernels multiplies rows by a stored weight: the families as records, and the one place that chooses."""
