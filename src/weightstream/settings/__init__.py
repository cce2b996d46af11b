"""The settings of a call, and the budgets and patterns that they are written in."""
