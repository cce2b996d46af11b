"""Speculative decoding with trees of drafted tokens, of which several continue a text in different ways."""
