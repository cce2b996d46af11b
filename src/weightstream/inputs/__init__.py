"""The inputs of the planner, gathered from a model, a checkpoint and a machine."""
