"""Building blocks of algorithms: the communicator, ranges, gathers and the cost model."""
