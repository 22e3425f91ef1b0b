"""The state of local steps in checkpoints."""
