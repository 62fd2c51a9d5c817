"""Forward-only calibration under Lightning, and the store of what it leaves behind."""
