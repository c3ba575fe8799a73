"""Number formats as records; encoding, rounding, packing and storage of their codes."""
