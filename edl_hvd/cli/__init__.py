"""The command ``edl-hvd``: flags, output, exit codes; every decision is made below this layer."""
