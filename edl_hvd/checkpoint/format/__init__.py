"""What is stored: the names of objects, JSON documents, shards, and what a checkpoint holds."""
