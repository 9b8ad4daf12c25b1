"""Measures: cold recovery of a job on stores (`replay`), the raw ceiling of a medium (`probe`), and the `demo`.

Promises numbers that the kernel's counters confirm, or says that they could not be confirmed. Prints nothing.
"""
