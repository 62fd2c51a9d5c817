"""Time and bytes, as measured."""
