"""Difference: the first wrong tensor of a layout, and why it is wrong. See docs/difference.md."""
