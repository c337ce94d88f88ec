"""Facts to findings. Nothing here reads the system."""
