"""Level 1: models and machines as values: what there is, and what it can do."""
