"""A scheme's record as constants of kernels, and which fast paths it permits."""
