"""State of many named gradients across steps."""
