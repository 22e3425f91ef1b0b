"""What algorithms are made of: the ranks of a call, gathers, folds, and the cost model."""
