"""Lossless coding of weights: fewer bytes on the link, on the device, on disk; every bit comes back."""
