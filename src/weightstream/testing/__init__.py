"""Backend and store wrappers that slow down, poison, fail or check; for tests of weightstream and of its users."""
