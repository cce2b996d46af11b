"""What this machine can do, measured and read: profiles for the planner. Above runtime, which it drives."""
