"""Building Horovod 0.28.1 against the torch that is installed.

Horovod's last release asks for C++14, torch since 2.1 for C++17 and since 2.12 for C++20. The files in
``cmake/`` make Horovod's own build answer that, and ``edits`` mends its defects. The modules here look
(``torch_facts``, ``tools``, ``cuda``), decide (``plan``), act (``compile``, ``wheels``) and prove that the result
works (``verify``). ``builder`` is the whole of it in order.
"""
