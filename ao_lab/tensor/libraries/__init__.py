"""What other libraries do with a layer's weight in their own way, where a quantized one needs something else.

Each module has a `register()`, called once its library is imported (`ao_lab.install.transformers_hook`).
"""
