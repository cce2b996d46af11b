"""One forward of a language model on a static cache: captured as a graph, cropped, and with the bits of single rows."""
