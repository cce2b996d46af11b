"""Text from a language model: prompts, sampling, and where an answer ends."""
