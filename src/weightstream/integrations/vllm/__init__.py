"""The plug-in for vLLM."""
