"""Operations of weights of experts (E, N, K)."""
