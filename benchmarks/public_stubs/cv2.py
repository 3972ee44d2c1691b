"""Stands in for OpenCV where a script imports it, and does not use it."""
