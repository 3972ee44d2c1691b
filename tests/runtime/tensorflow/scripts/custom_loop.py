"""A training loop written by hand: tf.data, tf.function, GradientTape, metrics."""

import tensorflow as tf

tf.keras.utils.set_random_seed(3)
batch_size = 16

true_weights = tf.random.normal((20, 1))
features = tf.random.normal((110, 20))
targets = tf.tanh(features @ true_weights) + 0.05 * tf.random.normal((110, 1))
train = tf.data.Dataset.from_tensor_slices((features[:90], targets[:90])).shuffle(90, seed=1).batch(batch_size)
valid = tf.data.Dataset.from_tensor_slices((features[90:], targets[90:])).batch(batch_size)

model = tf.keras.Sequential(
    [tf.keras.layers.Dense(48, activation="tanh"), tf.keras.layers.Dense(48, activation="tanh"), tf.keras.layers.Dense(1)]
)
loss_fn = tf.keras.losses.MeanSquaredError()
optimizer = tf.keras.optimizers.Adam(learning_rate=0.005)
train_loss = tf.keras.metrics.Mean()
ema = None


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = loss_fn(y, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = [tf.clip_by_norm(g, 1.0) for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss.update_state(loss)
    return loss


@tf.function
def valid_step(x, y):
    return loss_fn(y, model(x, training=False))


for epoch in range(3):
    train_loss.reset_state()
    for x, y in train:
        loss = train_step(x, y)
    if epoch == 1:
        optimizer.learning_rate.assign(0.002)
    ema = [w.numpy() if epoch == 0 else 0.5 * e + 0.5 * w.numpy() for e, w in zip(ema or model.weights, model.weights)]
    losses = [float(valid_step(x, y)) for x, y in valid]
    print(f"epoch {epoch}: last {float(loss):.4f}, mean {float(train_loss.result()):.4f}, valid {sum(losses) / len(losses):.4f}")

print("steps", int(optimizer.iterations.numpy()))
print(f"average of weights {sum(float(abs(e).sum()) for e in ema):.3f}")
