"""The same trace through the live pool and through the simulator, side by side."""
