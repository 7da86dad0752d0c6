"""Level 0: the values that every other package exchanges. Imports no torch, so it loads in milliseconds."""
