"""Horovod in this process: started, listened to, left, and what its world can compute together."""
