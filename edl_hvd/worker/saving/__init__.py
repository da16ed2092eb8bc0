"""What the ranks do about checkpoints."""
