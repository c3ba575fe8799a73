"""Linear layers with stored weights: GEMVs at one row, a small GEMM beyond."""
