# One GPU, 16 cores, about 90 s: bits of linear_bits; then its times by the rule, older kernels and bfloat16 beside it.
PYTHONPATH=$PWD timeout 75 python3 tests/gpu/linear/validate_linear_bits.py --no-times; bits=$?
PYTHONPATH=$PWD timeout 90 python3 tests/gpu/linear/validate_linear_bits.py --no-bits
exit $bits
