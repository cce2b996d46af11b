"""How transformers models generate: the loops, one token a pass or several."""
