"""Matrix products with a stated accumulation, and bounds on their error."""
