"""The adapter for the pipelines of diffusers."""
