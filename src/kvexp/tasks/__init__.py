"""Tasks: what is asked about a context, what is expected, and how answers are scored."""
