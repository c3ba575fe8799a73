"""From a call to a launch: plans, compiled kernels, and the cache of both."""
