"""A target for the quality of answers: certified by calibration, verified by checks, kept by adjusting the ratio."""
