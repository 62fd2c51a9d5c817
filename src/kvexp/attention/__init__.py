"""The registered attention function, its masks, taps and rotary helpers."""
