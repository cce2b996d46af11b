"""How transformers models generate: decode steps in graphs, on static caches, one token a pass or several."""
