"""Targets: each turns a Region into source and into a kernel. Which one serves which device type is in base.py."""
