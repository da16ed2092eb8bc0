"""What is mended in Horovod 0.28.1 and the Gloo that it brings along: every defect with its edits.

``release`` says how an edit is made, and ``mends`` lists all of them. The others hold the edits, by the part of
Horovod that they change.
"""
