"""Measures what a model costs on the hardware at hand, and makes a profile of it."""
