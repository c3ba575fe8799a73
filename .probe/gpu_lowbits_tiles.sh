# Another GPU at the same time, about 90 s: other tiles beside the rule's (TILES of fast/kernels/linear_bits/select.py), int3 and int6.
PYTHONPATH=$PWD timeout 90 python3 tests/gpu/linear/validate_linear_bits.py --no-bits --all --bits 3 6
