"""The sizes of models that both frameworks have."""
