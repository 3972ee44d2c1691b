"""A user's own training steps: tf.functions, Keras' fit, scripts."""
