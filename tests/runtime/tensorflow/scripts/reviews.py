"""Is a text positive? An LSTM over words, in a subclassed model with a train_step of its own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(21)
VOCAB, LENGTH = 60, 8


class Reader(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(VOCAB, 16)
        self.lstm = layers.LSTM(24)
        self.drop = layers.Dropout(0.1)
        self.out = layers.Dense(1)

    def call(self, tokens, training=False):
        return self.out(self.drop(self.lstm(self.embed(tokens)), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, self(x))
        return {m.name: m.result() for m in self.metrics}


texts = np.random.randint(VOCAB, size=(96, LENGTH))
labels = (texts < VOCAB // 2).mean(axis=1, keepdims=True) > 0.5

model = Reader()
model.compile(
    optimizer=keras.optimizers.RMSprop(0.01),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
dataset = tf.data.Dataset.from_tensor_slices((texts, labels.astype("float32"))).batch(24, drop_remainder=True).repeat()
history = model.fit(dataset, epochs=2, steps_per_epoch=4, verbose=0)
for name, values in sorted(history.history.items()):
    print(name, " ".join(f"{value:.3f}" for value in values))
before = model.get_weights()
history = model.fit(dataset, epochs=1, steps_per_epoch=2, verbose=0)  # goes on
print("again", f"{history.history['loss'][0]:.3f}", any((a != b).any() for a, b in zip(before, model.get_weights())))
