"""What a job keeps: captured, copied at every commit, put back, brought to one state."""
