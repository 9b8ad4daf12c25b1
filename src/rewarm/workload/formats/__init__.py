"""One module per trace format. Each has `matches(head)` for detection and `open(source)`, which gives a `Trace`."""
