"""Worker processes, here and behind ssh: their start, output, signals, stack and end."""
