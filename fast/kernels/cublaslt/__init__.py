"""Products of cuBLASLt that torch has no call for: a weight's gradient with its bias's in one product."""
