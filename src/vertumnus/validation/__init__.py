"""Whether the simulator tells the truth: one trace through a live pool and through the simulator, side by side."""
