"""Processes that work on one cell together: a line between them, how they are started, what they share."""
