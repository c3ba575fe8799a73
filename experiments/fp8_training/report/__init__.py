"""The page of experiment `fp8_training`."""
