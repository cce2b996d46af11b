"""Mechanism: backends, the engine that obeys a plan, and the streamer that binds it to a model."""
