"""Level 5, the command line: one small file per command, which parses its flags, calls the orchestrator and prints."""
