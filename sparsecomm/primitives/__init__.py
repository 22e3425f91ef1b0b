"""Building blocks of algorithms: the ranks of a call, gathers, folds, and the cost model."""
