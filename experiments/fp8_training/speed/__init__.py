"""Time and memory of training steps: single linear layers, a grid of small modules, decoder layers of published models."""
