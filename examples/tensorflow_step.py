"""A TensorFlow training step, placed whole: forward pass, loss, gradients and the optimizer's update run on several devices, the first
steps also as they are, for comparison. The variables stay yours: whoever looks at one has its value brought home first.

    python examples/tensorflow_step.py --steps=20

By default each device is a server process with a core of its own; --workers=thread takes logical devices of this process, which start
at once.
"""

import argparse

import tensorflow as tf

import baechi_ext


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--method", default="m_etf")
    parser.add_argument("--workers", choices=("process", "thread"), default="process")
    args = parser.parse_args()
    tf.keras.utils.set_random_seed(0)
    towers = [tf.keras.Sequential([tf.keras.layers.Dense(args.width, "relu") for _ in range(3)]) for _ in range(2)]
    head = tf.keras.layers.Dense(1)
    optimizer = tf.keras.optimizers.SGD(0.01)
    x = tf.random.normal((64, 2 * args.width))
    y = tf.tanh(tf.reduce_sum(x[:, :4], axis=1, keepdims=True))

    @baechi_ext.parallelize(devices=2, method=args.method, workers=args.workers)
    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            halves = tf.split(x, 2, axis=1)
            joined = tf.concat([tower(half) for tower, half in zip(towers, halves, strict=True)], axis=1)
            loss = tf.reduce_mean(tf.square(head(joined) - y))
        variables = [v for layer in (*towers, head) for v in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for step in range(args.steps):
        loss = train_step(x, y)
        if step in (0, args.steps - 1):
            print(f"step {step}: loss {float(loss):.6f}")
    print(train_step.report().line())
    print("steps the optimizer counts:", int(optimizer.iterations.numpy()))


if __name__ == "__main__":
    main()
