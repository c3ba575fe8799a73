"""Which modules of a model `convert_for_training_` converts, and why it leaves others."""
