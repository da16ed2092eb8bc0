"""Policies: one file each. ``by_name.py`` lists them."""
