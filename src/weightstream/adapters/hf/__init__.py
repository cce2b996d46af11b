"""The adapter for transformers and the Hugging Face Hub."""
