"""Level 3: apply a Plan to live objects, in place. It decides nothing; `plan/` does, and the two never import each other."""
