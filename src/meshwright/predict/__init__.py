"""Formulas for operations, memory and time. Pure NumPy, no torch."""
