"""The calls that users make, and what each of them puts together."""
