"""Which definitions of the source a measurement runs, and a hash of them."""
