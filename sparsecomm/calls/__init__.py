"""Collective calls: their options, one call as an object, and the queue of a communicator."""
