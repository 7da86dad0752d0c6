"""Level 1: describes models and machines as values: what there is, and what it can do."""
