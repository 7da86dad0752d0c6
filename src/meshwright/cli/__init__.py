"""Level 5: one small file a verb; each parses, calls, prints."""
