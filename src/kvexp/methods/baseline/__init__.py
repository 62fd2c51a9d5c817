"""Methods that attend to the context, or to a part of its text, in the ordinary way."""
