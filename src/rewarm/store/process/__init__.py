"""The I/O process: reads of a store in a process with an interpreter lock of its own, over memory that both map."""
