"""Algorithm selection: the choice that "auto" makes, and the profile of costs that it goes by."""
