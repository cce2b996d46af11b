"""Experts that are loaded one by one: cache slots, prefetch, rows and counters."""
