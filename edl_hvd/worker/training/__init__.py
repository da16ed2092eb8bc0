"""One step of the whole world's batch."""
