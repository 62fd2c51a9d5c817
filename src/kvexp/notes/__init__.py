"""Agent memories: they take in what was said or done and return units of text for a question."""
