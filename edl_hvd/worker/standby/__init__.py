"""A standby is a worker that takes the state of a world over while the world trains on, before it joins."""
