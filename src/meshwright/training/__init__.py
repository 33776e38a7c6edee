"""The step loop, optimizer and schedule, metrics, checkpoints."""
