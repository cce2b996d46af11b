"""Tools for the tensors of a model; this package knows nothing but torch."""
