"""The seam between the engine and the device that computes: memory, events and captured steps."""
