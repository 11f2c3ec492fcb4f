"""Precision policies in Keras on TensorFlow: loss scales, layers in float32, losses, saving."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import ringlet.keras as hvd
from ringlet.keras.value_collectives import variables_equal
from ringlet.precision import KEPT, DynamicScale, LossScale, Policy, StaticScale, parse_policy

pytestmark = pytest.mark.preloaded("tensorflow")

L = keras.layers
ODD = DynamicScale(512.0, growth=4.0, backoff=0.25, interval=2, least=64.0, most=1024.0)
# One compressor of each kind: sums and payloads, with and without a memory of each sort.
SPECS = (
    "none", "fp16", "int8", "int8 | ef", "topk(ratio=0.1) | ef", "signsgd", "powersgd | ef",
    "topk(ratio=0.1) | ef21", "topk(ratio=0.1) | momentum_correction", "int8 | server_ef",
)  # fmt: skip


def policy_of(scale, **options):
    return Policy("mine", "float16", "fp16", scale=scale, **options)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("scale", [ODD, StaticScale(1000.0), DynamicScale(interval=1)])
def test_a_loss_scale_takes_the_course_of_its_policy(scale, graph):
    import tensorflow as tf

    x = keras.Variable(np.zeros(3, np.float32))
    optimizer = hvd.LossScaleOptimizer.following(scale, keras.optimizers.SGD(1.0))
    optimizer.build([x])

    def step(gradient):
        optimizer.apply([gradient], [x])

    step = tf.function(step) if graph else step
    taken = 0
    for i, bad in enumerate([0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0]):
        gradient = np.full(3, np.nan if bad else scale.scale, np.float32)
        step(tf.convert_to_tensor(gradient))
        taken, scale = taken + (not bad) * gradient[0], scale.after(bool(bad))
        assert float(optimizer.dynamic_scale) == scale.scale, i
        assert int(optimizer.step_counter) == getattr(scale, "clean", int(optimizer.step_counter))
    assert int(optimizer.skipped_steps) == 5
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert again.get_config() == optimizer.get_config()


def test_scales_that_keras_cannot_follow_are_refused():
    class Own(DynamicScale):
        pass

    for scale in (LossScale(2.0), Own()):
        with pytest.raises(ValueError, match="no StaticScale and no DynamicScale"):
            hvd.LossScaleOptimizer.following(scale, keras.optimizers.SGD())
    for options, words in (
        ({"growth": 0.5}, "growth must be above 1"), ({"most": 2.0}, "must be between"),
        ({"growth": 1.0, "backoff": 1.0, "initial_scale": 0.0}, "above 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            hvd.LossScaleOptimizer(keras.optimizers.SGD(), **options)
    with pytest.raises(RuntimeError, match="use apply"):
        hvd.LossScaleOptimizer(keras.optimizers.SGD()).stateless_apply([], [], [])


class PreNormBlock(keras.layers.Layer):
    """A composite that has "norm" in its class, and so in the name that Keras gives it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = L.LayerNormalization(), L.Dense(6, name="up")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return self.second(self.first(x))


def network():
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    x = L.Embedding(10, 6, name="table")(tokens)
    x = PreNormBlock()(x)
    x = L.MultiHeadAttention(2, 3, name="attend")(x, x)
    x = L.Bidirectional(L.LSTM(3), name="both")(x)
    tower = [L.Dense(4, name="one"), L.BatchNormalization(name="bn"), L.ReLU(name="relu")]
    x = keras.Sequential([*tower, L.Dense(4, use_bias=False, name="two")], name="tower")(x)
    return keras.Model(tokens, L.Softmax(name="out")(L.Dense(2, name="head")(x)))


def in_float32(model):
    """Return the names of the layers that compute in float32, but for inputs."""
    layers = model._flatten_layers(include_self=False)
    layers = [layer for layer in layers if not isinstance(layer, L.InputLayer)]
    return {layer.name for layer in layers if layer.compute_dtype == "float32"}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (KEPT, {"table"}),
        ((), set()),
        (("head.*", "tower/two/kernel", "Softmax"), {"head", "two", "out", "softmax"}),
        (("tower.*",), {"tower", "one", "two", "relu"}),
        (("tower", "up*"), {"tower", "one", "two", "relu", "up"}),
        (("MultiHeadAttention",), {"attend", "query", "key", "value", "softmax",
                                   "dropout", "attention_output"}),
        (("both.*_lstm.*",), {"both", "forward_lstm", "backward_lstm", "lstm_cell"}),
        (("*.lstm_cell.bias", "*norm*"), set()),
    ],
)  # fmt: skip
def test_what_a_policy_keeps_computes_in_float32(keep, kept):
    keras.backend.clear_session(free_memory=False)
    model = network()
    policy = policy_of(StaticScale(8.0), keep=keep)
    assert policy.apply(model) is model
    norms = {"layer_normalization", "bn"}
    assert in_float32(model) == kept | norms
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    assert model.dtype_policy.name == "mixed_float16"  # so compile wants a loss scale
    hvd.apply_precision(model, policy)  # changes nothing
    assert in_float32(model) == kept | norms
    tokens = np.arange(15).reshape(3, 5) % 10
    found = keras.backend.standardize_dtype(model(tokens).dtype)
    assert found == ("float32" if "out" in kept else "float16")


def test_shared_layers_and_those_told_to_be_float32_stay():
    shared = L.Dense(4, name="shared")
    inputs = keras.Input((4,))
    one = keras.Sequential([keras.Input((4,)), shared], name="one")
    model = keras.Model(inputs, one(inputs) + shared(inputs))
    hvd.apply_precision(model, policy_of(StaticScale(8.0), keep=("one.shared.*",)))
    assert "shared" in in_float32(model)
    for layer, dtype in ((L.LayerNormalization(), "float32"), (L.Dense(2), "bfloat16")):
        layer.build((3, 4))
        assert hvd.apply_precision(layer, "bf16").compute_dtype == dtype
    try:
        policy = hvd.set_precision("bf16")
        told = L.Dense(2, dtype="float32", name="told")
        model = keras.Sequential([keras.Input((4,)), L.Dense(4), L.LayerNormalization(), told])
        with pytest.warns(UserWarning, match=r"does not keep \('head',\) in float32"):
            hvd.set_precision(policy_of(StaticScale(8.0), keep=("head",)))
    finally:
        keras.config.set_dtype_policy("float32")
    assert in_float32(model) == {"told"}
    hvd.apply_precision(model, policy)
    assert in_float32(model) == {"told", model.layers[1].name}


def test_models_that_a_policy_cannot_be_applied_to():
    def dense(**options):
        return keras.Sequential([keras.Input((4,)), L.Dense(2, name="d", **options)])

    compiled, called = dense(), dense()
    compiled.compile("sgd", "mse")
    called.predict(np.zeros((1, 4)), verbose=0)
    for model, words in (
        (compiled, "is compiled"), (called, "is compiled, or has been called by predict"),
        (keras.Sequential([L.Dense(2)]), "has no variables yet"),
        (dense(dtype="mixed_bfloat16"), "layers of float32 or mixed_float16; .*/d' is of 'mixed_b"),
        (dense(dtype="float16"), "is of 'float16' already"),
        (dense(dtype="int8_from_float32"), "is of 'int8_from_float32' already"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            hvd.apply_precision(model, "fp16")
    counting = L.Layer(name="counting")
    counting.steps = counting.add_weight(shape=(2,), dtype="int32", name="steps")
    counting.built = True
    with pytest.raises(ValueError, match=r"no use for .*steps', which is int32"):
        hvd.apply_precision(keras.Sequential([keras.Input((4,)), counting]), "fp16")
    with pytest.raises(ValueError, match=r"layers of float32 or float32; .* is of 'mixed_float16'"):
        hvd.apply_precision(dense(dtype="mixed_float16"), "fp32")
    look_up = keras.Sequential([keras.Input((1,), dtype="int32"), L.IntegerLookup(vocabulary=[3])])
    before = look_up.layers[0].dtype_policy
    assert hvd.apply_precision(look_up, "fp16").layers[0].dtype_policy is before
    with pytest.raises(TypeError, match=r"torch\.nn\.Module or a Keras model, not list"):
        parse_policy("fp16").apply([])


def classifier(precision, seed=0):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    layers = [L.Dense(64), L.BatchNormalization(), L.ReLU(), L.Dense(10, name="head")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    return hvd.apply_precision(model, precision)


def compiled(precision, optimizer, **options):
    model = classifier(precision)
    distributed = hvd.DistributedOptimizer(optimizer, precision=precision, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(distributed, loss)
    return model


def digits():
    """Return 320 images of this rank, and what they are."""
    images, labels = load_digits(return_X_y=True)
    own = slice(hvd.rank(), 320 * hvd.size(), hvd.size())
    return (images[own] / 16).astype("float32"), labels[own]


def case_losses_on_digits_follow_float32():
    curves = {}
    for precision, spec in (
        ("fp32", None), ("bf16", None), ("fp16(init=512)", "int8 | ef"), ("fp16(static=99)", None),
    ):  # fmt: skip
        model = compiled(precision, keras.optimizers.SGD(0.2), compression=spec)
        fitted = model.fit(
            *digits(), 32, 3, verbose=0, shuffle=False,
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        )  # fmt: skip
        curves[precision] = np.array(fitted.history["loss"])
        optimizer, policy = model.optimizer, parse_policy(precision)
        assert variables_equal([*model.trainable_weights, *optimizer.variables])
        assert isinstance(optimizer, hvd.LossScaleOptimizer) == policy.scale.watches
        assert not policy.scale.watches or int(optimizer.skipped_steps) == 0
        (step,) = optimizer._ringlet._lists.values()
        members = step.group.members.values()
        assert {str(member.declared) for member in members} == {spec or policy.compression}
        if policy.compression != "none" and spec is None:
            assert {member.strategy for member in members} == {"scatter_reduce"}
    plain = curves["fp32"]
    assert plain[-1] < 0.4 * plain[0]
    for precision, curve in curves.items():
        assert np.abs(curve - plain).max() < 0.01 * plain[0], (precision, curve, plain)


def case_a_loss_scale_that_is_there_stays():
    given = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    kept = hvd.DistributedOptimizer(given, precision="fp16(static=2)")
    assert kept.initial_scale == 8.0
    assert kept.inner_optimizer is given.inner_optimizer
    assert not isinstance(kept, hvd.LossScaleOptimizer)
    with pytest.raises(ValueError, match="did you mean"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), precision="fp61")


def remembered(state):
    """Return what a compressor remembers, in a form that compares every element."""
    if isinstance(state, dict):
        return {key: remembered(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state)


def case_a_vote_by_signs_is_not_divided_by_the_loss_scale():
    import tensorflow as tf

    x = keras.Variable(np.zeros(2048, np.float32), name="votes")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), precision=policy_of(StaticScale(256.0)), compression="signsgd"
    )
    optimizer.apply([tf.fill((2048,), 256.0 * 3)], [x])
    assert np.array_equal(x, np.full(2048, -1.0))


def case_an_overflow_on_one_rank_skips_the_step_on_all_with_every_kind_of_compressor():
    numbers = np.random.default_rng(7)  # the same on every rank
    scales = (StaticScale(256.0), ODD)
    for place, spec in enumerate(SPECS):
        scale, passes = scales[place % 2], 1 + place // 2 % 2
        x = keras.Variable(np.zeros((40, 50), np.float32), name="x")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1),
            precision=policy_of(scale),
            compression=spec,
            backward_passes_per_step=passes,
        )
        rank, skipped = int(numbers.integers(hvd.size())), 0
        bad = set(numbers.choice(6, 3, replace=False).tolist())
        own = np.random.default_rng(hvd.rank())
        for step in range(6):
            gradients = own.normal(size=(passes, 40, 50)).astype(np.float32) * scale.scale
            if step in bad and hvd.rank() == rank:
                gradients[0, 3, 4] = own.choice([np.inf, -np.inf, np.nan])
            before = np.array(x)
            held = remembered(optimizer._ringlet.memory.states)
            for gradient in gradients:
                optimizer.apply([keras.ops.convert_to_tensor(gradient)], [x])
            scale, skipped = scale.after(step in bad), skipped + (step in bad)
            assert float(optimizer.dynamic_scale) == scale.scale, (spec, step)
            assert int(optimizer.skipped_steps) == skipped, (spec, step)
            assert np.array_equal(before, x) == (step in bad), (spec, step)
            if step in bad and optimizer._ringlet.settings.guard:
                now = remembered(optimizer._ringlet.memory.states)
                assert now == held, (spec, step)
        assert variables_equal([x, *optimizer.variables]), spec


def case_a_scale_is_saved_in_mid_growth_and_goes_on():
    x, y = digits()
    weights = np.ones(160, np.float32)
    if hvd.rank() == 1:
        weights[40] = np.inf  # in the second of five steps
    path = Path(tempfile.mkdtemp()) / "model.keras"
    scale, policy, spec = ODD, policy_of(ODD), "topk(ratio=0.1) | ef"
    model = compiled(policy, keras.optimizers.SGD(0.05, momentum=0.9), compression=spec)
    model.fit(x[:160], y[:160], 32, verbose=0, shuffle=False, sample_weight=weights)
    for bad in (False, True, False, False, False):
        scale = scale.after(bad)
    model.save(path)
    again = hvd.load_model(path, precision=policy, compression=spec)
    hvd.set_compressor_state(again.optimizer, hvd.compressor_state(model.optimizer))
    assert in_float32(again) == in_float32(model)
    for optimizer in (model.optimizer, again.optimizer):
        assert isinstance(optimizer, hvd.LossScaleOptimizer)
        assert float(optimizer.dynamic_scale) == scale.scale
        assert int(optimizer.step_counter) == scale.clean > 0
        assert int(optimizer.skipped_steps) == 1
    for each in (model, again):
        each.fit(x[160:256], y[160:256], 32, verbose=0, shuffle=False)
    mine, theirs = ([*m.weights, *m.optimizer.variables] for m in (model, again))
    assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for _ in range(3):
        scale = scale.after(False)
    assert float(again.optimizer.dynamic_scale) == scale.scale
    assert variables_equal([*again.trainable_weights, *again.optimizer.variables])


def case_a_tape_beside_a_loss_scale():
    """What the docs show: a tape reduces, and LossScaleOptimizer skips on all ranks."""
    import tensorflow as tf

    import ringlet.tensorflow as tfhvd

    policy = parse_policy("fp16(static=128)")
    model = tfhvd.apply_precision(classifier("fp32"), policy)
    optimizer = tfhvd.LossScaleOptimizer.following(policy.scale, keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    x, y = digits()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            logits = tf.cast(model(x, training=True), tf.float32)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            scaled = optimizer.scale_loss(tf.reduce_mean(loss))
        tape = tfhvd.DistributedGradientTape(tape, precision=policy, compression="int8 | ef")
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, variables), variables)

    for number in range(4):
        before = [np.array(v) for v in model.trainable_variables]
        bad = number == 2
        step(x[:32] + (np.inf if bad and hvd.rank() == 1 else 0), y[:32])
        after = model.trainable_variables
        assert all(map(np.array_equal, before, after)) == bad
    assert int(optimizer.skipped_steps) == 1
    assert variables_equal([*model.trainable_variables, *optimizer.variables])


CASES = [name for name in dir() if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES)
def test_precision_on_two_ranks(run_case, case):
    run_case(globals()[case], "gloo", 2)
