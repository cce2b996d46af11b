"""The streamer, which runs the forward passes of one offloaded model."""
