"""Language models trained from scratch within a budget of bytes or seconds, in bfloat16 or with a low-precision recipe."""
