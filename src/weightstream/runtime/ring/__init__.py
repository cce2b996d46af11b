"""The ring of device memory, which copies fill ahead of compute, eagerly and in graphs."""
