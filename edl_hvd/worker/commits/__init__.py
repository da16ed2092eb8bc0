"""The state of a job: captured, saved at every commit, restored, agreed on by all members of a world."""
