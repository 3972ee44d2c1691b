"""A placed step as graphs and variables of TensorFlow."""
