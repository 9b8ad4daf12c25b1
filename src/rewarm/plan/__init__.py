"""The planner: recompute, local drive or array, and how many. Opens no file, prints nothing."""
