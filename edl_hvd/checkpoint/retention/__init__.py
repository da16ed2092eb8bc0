"""Which checkpoints stay, and what is deleted after each new one."""
