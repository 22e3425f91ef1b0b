"""Building blocks of algorithms: the communicator, ranges, gathers, folds and the cost model."""
