"""Engines that drive the life cycle of `weightstream.offloaders`: one module for each, imported by that engine."""
