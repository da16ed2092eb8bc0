"""Writing checkpoints: when one is due, which rank writes what, and the thread that writes it."""
