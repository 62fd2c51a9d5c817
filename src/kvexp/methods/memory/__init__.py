"""Methods that replace the prefix by a memory of attention states."""
