"""Algorithm selection: the choice that "auto" makes, the costs that it uses, and their measurement."""
