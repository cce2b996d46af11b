"""The weights of a model and the host memory or files that hold their bytes."""
