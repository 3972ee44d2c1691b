"""Trains a small convolutional network on images like MNIST's, with everything around it that people use."""

import argparse
import os
import tempfile

import keras
import numpy as np
from keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

keras.utils.set_random_seed(812)
num_classes = 10
input_shape = (12, 12, 1)

# Every digit is a pattern of its own, with noise.
patterns = np.random.rand(num_classes, *input_shape).astype("float32")


def make_data(count):
    labels = np.random.randint(num_classes, size=count)
    images = patterns[labels] + 0.3 * np.random.randn(count, *input_shape).astype("float32")
    return images, keras.utils.to_categorical(labels, num_classes)


x_train, y_train = make_data(200)  # no multiple of the batch size
x_test, y_test = make_data(64)

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(16, kernel_size=(3, 3)),
        layers.BatchNormalization(momentum=0.5),
        layers.Activation("relu"),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(num_classes, activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.SGD(0.05, momentum=0.9), metrics=["accuracy"])


class Watch(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.norms = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.norms.append(float(np.linalg.norm(self.model.layers[0].kernel.numpy())))

    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch}: lr {float(self.model.optimizer.learning_rate):.5f}, step {int(self.model.optimizer.iterations)}")


best = os.path.join(tempfile.mkdtemp(), "best.keras")
watch = Watch()
history = model.fit(
    x_train,
    y_train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_split=0.1,
    verbose=0,
    callbacks=[
        keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.8),
        keras.callbacks.ModelCheckpoint(best, save_best_only=True),
        keras.callbacks.EarlyStopping(patience=5),
        watch,
    ],
)
for name, values in sorted(history.history.items()):
    print(name, " ".join(f"{value:.4f}" for value in values))
print("norms", " ".join(f"{norm:.4f}" for norm in watch.norms))

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"test loss {loss:.4f}, accuracy {accuracy:.4f}")
restored = keras.models.load_model(best)
print(f"restored {restored.evaluate(x_test, y_test, verbose=0)[0]:.4f}")
print("predicted", model.predict(x_test[:8], verbose=0).argmax(axis=1))
