"""Measurements of this machine: profiles, checks, comparisons. Above runtime, whose backends it uses."""
