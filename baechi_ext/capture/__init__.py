"""Capture: a real training step -> (OpGraph, Binding). The Binding ties op ids to the framework's own objects and can't be saved."""
