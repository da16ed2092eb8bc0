"""The loops over batches that a script writes: ``state.steps``, ``state.batches`` and ``state.evaluate``."""
