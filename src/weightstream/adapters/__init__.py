"""The only code that knows a framework's model classes."""
