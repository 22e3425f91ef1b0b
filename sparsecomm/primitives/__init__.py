"""Building blocks of algorithms: the ranks of a call, gathers, folds, rings, and the cost model."""
