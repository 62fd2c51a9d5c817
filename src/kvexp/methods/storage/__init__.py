"""Methods that keep every row, in fewer bits."""
