"""A target for the quality of answers: certified by calibration, verified by checks, kept by adjusting the ratio.

The engine knows one object of it, `QualityControl`. It asks that for the ratio before a prefill, and tells it of answers.
"""
