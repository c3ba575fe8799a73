"""What a layer in low precision loses: estimators of its error with intervals, models of inputs, a bank of faulty kernels."""
