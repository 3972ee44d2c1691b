"""Ranks support tickets from a title and tags: a functional model with two inputs and two outputs, by name."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(5)
num_words, num_tags, num_departments, count = 50, 12, 4, 64

title = keras.Input(shape=(6,), name="title", dtype="int32")
tags = keras.Input(shape=(num_tags,), name="tags")
words = layers.GlobalAveragePooling1D()(layers.Embedding(num_words, 24)(title))
x = layers.Concatenate()([layers.Dense(24, activation="relu")(words), layers.Dense(24, activation="relu")(tags)])
x = layers.LayerNormalization()(x)
priority = layers.Dense(1, name="priority", activation="sigmoid")(x)
department = layers.Dense(num_departments, name="department")(x)
model = keras.Model(inputs=[title, tags], outputs={"priority": priority, "department": department})
model.compile(
    optimizer=keras.optimizers.AdamW(0.01),
    loss={"priority": "binary_crossentropy", "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"department": ["accuracy"]},
    steps_per_execution=2,
)

data = {
    "title": np.random.randint(num_words, size=(count, 6)).astype("int32"),
    "tags": np.random.randint(2, size=(count, num_tags)).astype("float32"),
}
targets = {
    "priority": data["tags"][:, :1] * data["tags"][:, 1:2],
    "department": data["title"].sum(axis=1) % num_departments,
}
weights = {"priority": np.linspace(0.5, 1.5, count), "department": np.ones(count)}
history = model.fit(data, targets, sample_weight=weights, epochs=2, batch_size=16, verbose=0, shuffle=False)
for name, values in sorted(history.history.items()):
    print(name, " ".join(f"{value:.3f}" for value in values))
result = model.evaluate(data, targets, verbose=0, return_dict=True)
print({name: round(float(value), 3) for name, value in sorted(result.items())})
batch = [value[:16] for value in data.values()]
print(f"on batch {model.train_on_batch(batch, {n: t[:16] for n, t in targets.items()}, return_dict=True)['loss']:.3f}")
