// What a launch is given, and the numbers of elements and dtypes.

#if WEIGHTS > 1
// Of a further weight of the same launch.
struct Further {
  const char *words, *scale, *zero;
  void* y;
};
#endif

struct Problem {
  const char* x;          // (count, k) of 16 bits
  const char* words;      // (n / 64, k / 64, ATOM bytes)
  const char* scale;      // float32 (blocks, n); of NF4 more rows behind; or of factors the weight's own scale (n / 2), then they
  const char* zero;       // int32 (blocks, n / 2): pairs of rows n and n + 8; not read without ZERO
  const float* x_scale;   // (count); may be null
  const void* bias;       // (n); may be null
  void* y;                // (count, n)
#if WEIGHTS > 1
  Further more[WEIGHTS - 1];  // without a bias; y is null where GATED
#endif
  int count, n, k;
  int bias_kind;          // FLOAT32, ...; that of y is OUT
#if WEIGHTS > 1
  int rows[2];            // of the further weights
#endif
};

enum { INT4 = 0, INT8 = 1, E4M3 = 2, E2M1 = 3, E4M3_MX = 4, NF4 = 5 };
