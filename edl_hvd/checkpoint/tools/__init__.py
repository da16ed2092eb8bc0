"""What the command line does with checkpoints: list, verify, copy and export them, without torch."""
