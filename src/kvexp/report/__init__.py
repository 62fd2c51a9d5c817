"""What a run leaves behind: its folder, its record, the table in the terminal, and loggers."""
