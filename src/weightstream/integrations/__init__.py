"""Plug-ins for inference engines that stream their weights through weightstream."""
