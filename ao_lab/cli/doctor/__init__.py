"""`ao-lab doctor`."""
