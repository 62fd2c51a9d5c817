"""Methods that place text encoded elsewhere, and repair it where it stands."""
