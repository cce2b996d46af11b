"""Planning: pure functions from a manifest and budgets to a `Plan`. No torch, no I/O, no clock."""
