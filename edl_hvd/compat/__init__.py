"""Changes of other libraries while a process runs; docs/patches.md lists them, and how to leave them out.

Whoever changes an attribute of another library does it through ``patching``, or here.
"""
