"""Lossless compression of weights: fewer bytes on the PCIe link, on the device and on disk."""
