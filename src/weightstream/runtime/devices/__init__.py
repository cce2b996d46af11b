"""Compute devices: their memory, streams, copies and graphs."""
