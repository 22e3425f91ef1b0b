"""What "auto" takes, and the costs that it goes by."""
