"""Inside a worker: how it joins a world, what it keeps, and the loop that survives the world's changes."""
